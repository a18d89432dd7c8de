"""Drives the system's Chromium, headless, by Playwright: how tests open a page of the explorer and wait for it.

No test sleeps or reads a page that may still change: aria-busy states whether a page is idle, and `changed` and `expect`
wait for the effect of an action, however slow the machine is.
"""

import re
import shutil
import signal

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 120_000
"""Milliseconds until a test fails; other tests may use both cores."""
SUMMARY = """id => {
  const figure = document.querySelector('#' + id + ' .js-plotly-plot');
  if (!figure || !figure._fullData) return null;
  const flat = array => array === undefined ? [] : Array.from(array).flatMap(v => v.length === undefined ? [v] : Array.from(v));
  return {
    titles: figure.layout.annotations.map(a => a.text.replaceAll('<br>', ' ')),
    traces: figure._fullData.map(t => {
      const values = flat(t.type === 'heatmap' ? t.z : t.y).filter(Number.isFinite);
      return {type: t.type, name: t.name, size: values.length, sum: values.reduce((a, b) => a + Math.abs(b), 0)};
    }),
  };
}"""


def take_interrupts():
    """In the server's process: tests that run in the background of a shell ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def go(page, address, query, path=""):
    """Open a link once the previous page is idle."""
    page.wait_for_function(
        "() => Array.from(document.querySelectorAll('.view')).every(view => !view.clientWidth || view.ariaBusy === 'false')"
    )
    page.goto(address + path + query)
    return idle(page, re.search(r"view=(\w+)", query)[1])


def idle(page, key):
    """Wait until a page is idle: its controls are restored and the fine figures are drawn."""
    page.wait_for_selector(f".view[data-page={key}][aria-busy=false]")
    return key


def figure(page, element):
    """A summary of a figure, once its page is idle."""
    idle(page, element.split("-")[0])
    page.wait_for_function(f"id => ({SUMMARY})(id) !== null", arg=element)
    return page.evaluate(SUMMARY, element)


def changed(page, element, before):
    """A summary of a figure, once it differs from `before` and its page is idle."""
    page.wait_for_function(
        f"([id, before]) => {{ const now = ({SUMMARY})(id); return now && JSON.stringify(now) !== before; }}",
        arg=[element, page.evaluate("x => JSON.stringify(x)", before)],
    )
    return figure(page, element)
