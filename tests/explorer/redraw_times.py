"""How long the explorer takes from a control's movement to the new figure, in a real browser on this machine.

    python -m tests.explorer.redraw_times [--rounds 12] [--all] [--only sentence,xpos] [--out results.json]

Compare at length 512 with three encodings, Your sentence with 48 words (the maximum), Extend RoPE. The time is taken in
the browser, from the control's event to the last `plotly_afterplot` of the figures that change, or to the response that
none does; "painted" includes the browser's own painting. Every round sets a value that the control has not had before,
so only what the control does not affect comes from a cache. --all moves every slider of every encoding; --out keeps an
earlier run's rows of other controls. The exit status is 1 if a median or a 90th percentile reaches 200 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from posenc.core import files

LIMIT = 200.0
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
WORDS = "+".join(f"word{n % 31}" for n in range(48))


class Move(NamedTuple):
    query: str  # {n} is another number in each pass, so that a control with few values has new figures
    control: str
    values: tuple[float, ...]


def slider_values(low: float, high: float, step: float, most: int = 16) -> tuple[float, ...]:
    """Values of a slider, evenly from its lowest to its highest."""
    count = int((high - low) / step + 1e-9) + 1
    chosen = sorted({round(k * (count - 1) / (most - 1)) for k in range(most)}) if count > most else range(count)
    return tuple(round(low + step * k, 6) for k in chosen)


def moves(everything: bool) -> Iterator[Move]:
    from posenc.encodings.registry import list_encodings
    from posenc.explorer.pages.option_controls import options_of

    three = "?view=compare&a=t5:max_distance=1{n}8&b=alibi&c=rope&length=512"
    yield Move(three, "compare-head", tuple(range(1, 8)))
    yield Move("?view=compare&length=512", "compare-train", slider_values(32, 496, 16))
    yield Move("?view=compare&length=256", "compare-length", slider_values(272, 512, 16))
    yield Move(
        "?view=compare&a=shaw&b=deberta&c=transformer_xl&length=256", "compare-length", slider_values(272, 512, 16)
    )
    names = list_encodings() if everything else ("t5", "shaw", "deberta", "transformer_xl", "relative_logits")
    for name in names:
        sliders = [option for option in options_of(name) if option.kind == "slider"]
        for number, option in enumerate(sliders[:3]):
            values = tuple(v for v in slider_values(option.low, option.high, option.step) if v != option.default)
            yield Move(f"?view=compare&a={name}&b=alibi&c=rope&length=512", f"compare-a-slider-{number}", values)
    yield Move(f"?view=sentence&text={WORDS}+{{n}}", "sentence-head", (1, 2, 3))
    yield Move(f"?view=sentence&text={WORDS}", "sentence-strength", slider_values(0.05, 2.0, 0.05))
    yield Move(f"?view=sentence&text={WORDS}&change=shift", "sentence-shift", slider_values(10, 990, 1))
    yield Move("?view=extend", "extend-target", slider_values(8192, 65536, 3584))
    yield Move("?view=extend", "extend-base", slider_values(20000, 500000, 32000))


MOVE = """async ([control, page, value]) => {
  const input = document.querySelector(`#${control} input[type=range], #${control} input[type=number]`);
  const view = document.querySelector(`.view[data-page=${page}]`);
  const figures = Array.from(view.querySelectorAll('.js-plotly-plot'));
  let end = null;
  const drawn = () => { end = performance.now(); };
  figures.forEach(figure => figure.on('plotly_afterplot', drawn));
  const rest = new Promise((done, fail) => {
    let busy = false;
    const watch = new MutationObserver(() => {
      if (view.ariaBusy === 'true') busy = true;
      else if (busy) { watch.disconnect(); done(performance.now()); }
    });
    watch.observe(view, {attributes: true, attributeFilter: ['aria-busy']});
    setTimeout(() => fail(new Error(`${control} = ${value} draws nothing`)), 10000);
  });
  const start = performance.now();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(input, value);
  input.dispatchEvent(new Event('input', {bubbles: true}));
  const idle = await rest;
  figures.forEach(figure => figure.removeListener('plotly_afterplot', drawn));
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return [(end ?? idle) - start, performance.now() - start];
}"""


def measure(page, address: str, move: Move, rounds: int) -> list[tuple[float, float]]:
    """(drawn, painted) in milliseconds of each round."""
    times: list[tuple[float, float]] = []
    key = move.control.split("-")[0]
    for number in range(rounds):
        page.goto(address + move.query.format(n=number + 1))
        page.wait_for_selector(f".view[data-page={key}][aria-busy=false]")
        page.wait_for_timeout(500)  # let the page settle, for example garbage collection
        for value in move.values:
            times.append(page.evaluate(MOVE, [move.control, key, str(value)]))
            page.wait_for_timeout(120)
            if len(times) > rounds + 1:
                return times[2:]  # the first two warm up the browser's compiler
    return times[2:]


def percentile(times: Sequence[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _kept(path: str | None) -> dict[tuple[str, str], dict[str, int]]:
    """The rows of an earlier run, by view and control."""
    if path is None or not Path(path).exists():
        return {}
    rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    return {(row.pop("view"), row.pop("control")): row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--all", action="store_true", help="every slider of every encoding")
    parser.add_argument(
        "--only", default="", help="views or controls that contain one of these texts, separated by commas"
    )
    parser.add_argument("--out", help="write the results here, as JSON")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("no Chromium on this machine (apt-get install chromium)", file=sys.stderr)
        return 2
    server = subprocess.Popen(
        [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    slow, rows = 0, _kept(given.out)
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            print(f"{os.cpu_count()} cores; Chromium {browser.version}; milliseconds")
            print(f"{'view':62} {'control':20} {'median':>7} {'p90':>7} {'worst':>7} {'painted':>8}")
            machine = {"cores": os.cpu_count(), "chromium": browser.version, "rounds": given.rounds}
            for move in moves(given.all):
                view = move.query.replace(WORDS, "...")
                if not any(word in f"{view} {move.control}" for word in given.only.split(",")):
                    continue
                times = measure(page, address, move, given.rounds)
                drawn = [time for time, _ in times]
                middle, high = statistics.median(drawn), percentile(drawn, 0.9)
                painted = statistics.median(time for _, time in times)
                late = high >= LIMIT or middle >= LIMIT
                slow += late
                numbers = {"median": middle, "p90": high, "worst": max(drawn), "painted": painted}
                rows[view, move.control] = {k: round(v) for k, v in numbers.items()}
                if given.out is not None:
                    listed = [{"view": v, "control": c} | row for (v, c), row in rows.items()]
                    report = {"machine": machine, "unit": "ms", "limit": LIMIT, "rows": listed}
                    files.write_json(given.out, report)
                print(
                    f"{view[:62]:62} {move.control:20} {middle:7.0f} {high:7.0f} "
                    f"{max(drawn):7.0f} {painted:8.0f}{'  over ' + format(LIMIT, '.0f') if late else ''}",
                    flush=True,
                )
            browser.close()
    finally:
        server.terminate()
        server.wait(20)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
