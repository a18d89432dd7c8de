"""A real browser over every page: Chromium of the system, headless, driven by Playwright."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

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
PATIENCE = 30_000
SUMMARY = """id => {
  const figure = document.querySelector('#' + id + ' .js-plotly-plot');
  if (!figure || !figure._fullData) return null;
  const flat = values => values === undefined ? [] : Array.from(values).flatMap(v => v.length === undefined ? [v] : Array.from(v));
  return {
    titles: figure.layout.annotations.map(a => a.text.replaceAll('<br>', ' ')),
    traces: figure._fullData.map(t => {
      const numbers = flat(t.type === 'heatmap' ? t.z : t.y).filter(Number.isFinite);
      return {type: t.type, name: t.name, size: numbers.length, sum: numbers.reduce((a, b) => a + Math.abs(b), 0)};
    }),
  };
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server of its own, in an empty folder, with no way out to a network it could use."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", str(47900 + os.getpid() % 500)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        cwd=tmp_path_factory.mktemp("explorer"),
    )  # fmt: skip
    found = None
    said = []
    while found is None:
        line = server.stdout.readline()
        said.append(line)
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if not line and server.poll() is not None:
            pytest.fail("the server did not start:\n" + "".join(said))
    yield found[0]
    server.terminate()
    server.communicate(timeout=20)  # also closes the pipe


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def tab(browser, address):
    """One window for the module; what it complains about and whom it asks is kept and checked after each test."""
    window = browser.new_page(viewport={"width": 1400, "height": 1000}, accept_downloads=True)
    window.set_default_timeout(PATIENCE)
    window.complaints, window.asked = [], []
    window.on("console", lambda m: window.complaints.append(m.text) if m.type in ("error", "warning") else None)
    window.on("pageerror", lambda error: window.complaints.append(str(error)))
    window.on("request", lambda request: window.asked.append(request.url))
    yield window
    window.close()


@pytest.fixture
def page(tab):
    tab.complaints.clear()
    tab.asked.clear()
    yield tab
    assert tab.complaints == []
    outside = [
        url
        for url in tab.asked
        if urlparse(url).scheme not in ("blob", "data") and urlparse(url).hostname != "127.0.0.1"
    ]
    assert outside == []


def go(page, address, query, path=""):
    page.goto(address + path + query)
    key = re.search(r"view=(\w+)", query)[1]
    page.wait_for_selector(f"#{key}-status p", state="attached")
    return key


def figure(page, where):
    """What a figure holds, once it is drawn."""
    page.wait_for_function(f"id => ({SUMMARY})(id) !== null", arg=where)
    return page.evaluate(SUMMARY, where)


def settled(page, where):
    """What a figure holds once it stays the same: a page opens with its defaults and is then set by the link."""
    seen = figure(page, where)
    for _ in range(40):
        page.wait_for_timeout(400)
        if (now := figure(page, where)) == seen:
            return now
        seen = now
    raise AssertionError(f"{where} never stops changing")


def changed(page, where, before):
    """What a figure holds once it is another than before."""
    page.wait_for_function(
        f"([id, before]) => {{ const now = ({SUMMARY})(id); return now && JSON.stringify(now) !== before; }}",
        arg=[where, page.evaluate("x => JSON.stringify(x)", before)],
    )
    return figure(page, where)


def slide(page, where, value):
    """Move a slider as a hand does: its native element gets the value and says so."""
    page.eval_on_selector(
        f"#{where} input[type=range]",
        "(e, v) => { Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(e, v);"
        " e.dispatchEvent(new Event('input', {bubbles: true})); }",
        str(value),
    )


def choose(page, where, name):
    """Take an entry of a drop-down list."""
    page.click(f"#{where} input")
    page.click(f"[role=option][aria-label={name!r}], [role=option][data-value={name!r}]")


def alert(page, key):
    page.wait_for_selector(f"#{key}-status [role=alert]")
    return page.inner_text(f"#{key}-status [role=alert]")


def test_every_page_opens_and_draws(page, address):
    go(page, address, "?view=gallery&scheme=alibi")
    assert figure(page, "gallery-plot-0")["titles"][0].startswith("alibi:")
    assert "BLOOM" in page.inner_text("#gallery-html")
    for name, figures in (("Compare", 2), ("Your sentence", 3), ("Extend RoPE", 2)):
        page.get_by_role("tab", name=name).click()
        key = name.split()[-1].lower().replace("rope", "extend")
        for number in range(figures):
            drawn = figure(page, f"{key}-plot-{number}")
            assert drawn["traces"] and all(t["size"] for t in drawn["traces"]), (name, number)
            assert all(drawn["titles"])
    page.get_by_role("tab", name="Results").click()
    assert "no run here yet" in alert(page, "results")


def test_controls_change_the_figure_s_data(page, address):
    go(page, address, "?view=gallery")
    before = figure(page, "gallery-plot-0")
    page.click("#gallery-scheme label:has-text('rope')")
    assert changed(page, "gallery-plot-0", before)["titles"][0].startswith("rope:")
    page.get_by_role("tab", name="Compare").click()
    before = figure(page, "compare-plot-1")
    slide(page, "compare-a-slider-0", 8)
    after = changed(page, "compare-plot-1", before)
    assert after["traces"][0]["sum"] != before["traces"][0]["sum"]
    assert after["traces"][1:] == before["traces"][1:]  # the other schemes stay
    choose(page, "compare-b", "shaw")
    after = changed(page, "compare-plot-1", after)
    assert after["titles"][1].startswith("shaw")
    assert page.inner_text("#compare-b-slider-0 label span").strip() == "k"  # its own options
    slide(page, "compare-head", 3)
    assert "head 3" in changed(page, "compare-plot-1", after)["titles"][0]


def test_a_long_sequence_is_drawn_coarsely_and_then_finely(page, address):
    go(page, address, "?view=compare&a=alibi&b=rope&c=")
    before = figure(page, "compare-plot-1")
    page.evaluate(
        "() => { window.sizes = new Set(); setInterval(() => { const figure = document.querySelector('#compare-plot-1"
        " .js-plotly-plot'); if (figure) window.sizes.add(figure._fullData[0].z.length); }, 5); }"
    )
    slide(page, "compare-length", 4096)
    changed(page, "compare-plot-1", before)
    page.wait_for_function("() => window.sizes.has(187)")
    assert 64 in page.evaluate("() => Array.from(window.sizes)")


def test_the_animation_grows_past_the_training_length(page, address):
    go(page, address, "?view=compare&a=alibi&b=&c=&train=64&length=512")
    figure(page, "compare-plot-0")
    page.click("#compare-play")
    read = "() => Number(document.querySelector('#compare-length input[type=number]').value)"
    page.wait_for_function(f"() => ({read})() < 64")
    page.wait_for_function(f"() => ({read})() > 64")


def test_a_link_restores_its_view(page, address):
    go(page, address, "?view=compare&a=t5&b=alibi&c=&length=128")
    before = figure(page, "compare-plot-1")
    slide(page, "compare-a-slider-0", 12)
    after = changed(page, "compare-plot-1", before)
    page.wait_for_function("() => location.search.includes('buckets=12')")
    link = page.get_attribute("#compare-link", "href")
    assert link == "?view=compare&a=t5:buckets=12&c=&length=128"
    go(page, address, link)
    assert figure(page, "compare-plot-1") == after
    assert page.input_value("#compare-a-slider-0 input[type=number]") == "12"
    assert page.get_by_role("tab", name="Compare").get_attribute("aria-selected") == "true"


def test_languages_switch_and_keep_the_view(page, address):
    go(page, address, "?view=extend&scaling=linear&target=8192")
    english = settled(page, "extend-plot-0")
    assert "pairs make no full turn" in english["titles"][0]
    page.click("a.switch")
    page.wait_for_url("**/zh/**")
    page.wait_for_selector("#extend-status p", state="attached")
    chinese = settled(page, "extend-plot-0")
    assert "转不满一圈" in chinese["titles"][0]
    assert [t["sum"] for t in chinese["traces"]] == [t["sum"] for t in english["traces"]]
    assert page.get_by_role("tab", name="你的句子").count() == 1
    assert page.input_value("#extend-target input") == "8192"
    page.click("a.switch")
    page.wait_for_function("() => !location.pathname.startsWith('/zh')")
    page.wait_for_selector("#extend-status p", state="attached")
    assert "view=extend" in page.url and page.inner_text("h1") == "posenc explorer"


def test_bad_input_gets_a_sentence_and_strange_text_is_drawn(page, address):
    go(page, address, "?view=sentence")
    before = figure(page, "sentence-plot-2")
    page.fill("#sentence-text textarea", "")
    assert "no words" in alert(page, "sentence")
    assert figure(page, "sentence-plot-2") == before
    page.eval_on_selector(
        "#sentence-text textarea",
        "e => { e.value = 'a'.repeat(1e6); e.dispatchEvent(new Event('input', {bubbles: true})); }",
    )
    page.wait_for_function("() => document.querySelector('#sentence-status').innerText.includes('1,000,000')")
    page.fill("#sentence-text textarea", "שלום עולם 👩‍👩‍👧 <b>x</b> مرحبا")
    page.wait_for_selector("#sentence-status .note")
    assert changed(page, "sentence-plot-2", before)["traces"]
    assert "שלום" in page.inner_text("#sentence-html") and page.locator("#sentence-html b").count() == 0
    go(page, address, "?view=compare&a=t5:buckets=7&b=&c=")
    assert "buckets" in alert(page, "compare")
    go(page, address, "?view=extend&target=many")
    assert "number" in alert(page, "extend")
    assert "Traceback" not in page.content()


def test_code_and_exports(page, address):
    go(page, address, "?view=extend&scaling=ntk&target=8192")
    drawn = figure(page, "extend-plot-0")
    assert "rope_theta" in page.inner_text("#extend-json")
    page.click("#extend-code summary")
    page.wait_for_selector("#extend-code pre >> visible=true")
    assert "posenc.scaling.NTK(factor=2.0)" in page.inner_text("#extend-code pre")
    with page.expect_download() as waiting:
        page.click("#extend-csv")
    text = Path(waiting.value.path()).read_text(encoding="utf-8-sig")
    assert text.splitlines()[0] == drawn["titles"][0]
    with page.expect_download() as waiting:
        page.click("#extend-png")
    assert waiting.value.suggested_filename.endswith(".png")
    assert Path(waiting.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page.wait_for_timeout(500)  # the second figure's picture follows


def test_the_keyboard_is_enough(page, address):
    go(page, address, "?view=gallery")
    figure(page, "gallery-plot-0")
    page.get_by_role("tab", name="Gallery").focus()
    for _ in range(6):
        if page.evaluate("document.activeElement.innerText") == "Compare":
            break
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "Compare"
    page.keyboard.press("Enter")
    before = figure(page, "compare-plot-1")
    page.focus("#compare-head input[type=range]")
    page.keyboard.press("ArrowRight")
    after = changed(page, "compare-plot-1", before)
    assert "head 1" in after["titles"][0]
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run of the lab, the smallest there is."""
    folder = tmp_path_factory.mktemp("lab") / "smoke"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posenc", "compare", "--preset", "smoke", "--out", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_run_of_the_lab_is_opened_and_its_report_browsed(page, address, run):
    go(page, address, "?view=results")
    assert "no run here yet" in alert(page, "results")
    page.fill("#results-run input", str(run))
    page.keyboard.press("Enter")
    drawn = figure(page, "results-plot-0")
    rows = json.loads((run / "results.json").read_text())["rows"]
    assert {t["name"] for t in drawn["traces"]} == {row["scheme"] for row in rows}
    assert any(row["task"] in drawn["titles"][0] for row in rows)
    report = page.frame_locator("#results-html iframe")
    report.locator("h1").first.wait_for()
    report.locator(".js-plotly-plot .main-svg").first.wait_for(state="attached")  # its own script runs in the sandbox
    assert page.input_value("#results-run input") == str(run)
    link = page.get_attribute("#results-link", "href")
    go(page, address, link)
    assert figure(page, "results-plot-0") == drawn
    with page.expect_popup() as waiting:
        page.click("#results-html a")
    waiting.value.wait_for_selector("h1")
    waiting.value.close()


NAMELESS = """() => Array.from(document.querySelectorAll('input, textarea, select, button, a[href], iframe'))
  .filter(e => e.checkVisibility() && e.offsetParent !== null && e.type !== 'hidden' && !e.closest('.modebar'))
  .filter(e => {
    const named = e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.title || e.alt
      || (e.labels && Array.from(e.labels).map(l => l.innerText).join('')) || e.innerText || e.placeholder;
    return !(named || '').trim();
  }).map(e => e.outerHTML.slice(0, 160))"""


def test_everything_has_a_name_for_assistive_technology(page, address):
    go(page, address, "?view=gallery")
    for name in ("Gallery", "Compare", "Your sentence", "Extend RoPE", "Results"):
        page.get_by_role("tab", name=name).click()
        page.wait_for_timeout(300)
        assert page.evaluate(NAMELESS) == []
    assert page.locator("h1").count() == 1
    page.get_by_role("tab", name="Compare").click()
    status = page.locator("#compare-status")
    assert status.get_attribute("aria-live") == "polite"
    figure(page, "compare-plot-1")
    page.wait_for_function("() => document.querySelector('#compare-status').innerText.includes('head 0')")  # titles, told
