"""How long the explorer takes from a slider's movement to the new figure, in a real browser on this machine.

    python -m bench.explorer_redraw [--rounds 15]

Every slider of Compare at length 512 with three schemes, and those of the other pages. The clock runs in the browser,
from the slider's event to Plotly's last `afterplot`; the median and the worst of the rounds are printed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
# (query, slider, figures that it redraws, values to move between)
MOVES = [
    (
        "?view=compare&a=t5&b=alibi&c=rope&length=512",
        "compare-a-slider-0",
        ("compare-plot-0", "compare-plot-1"),
        (16, 24),
    ),
    ("?view=compare&a=t5&b=alibi&c=rope&length=512", "compare-head", ("compare-plot-0", "compare-plot-1"), (1, 2)),
    (
        "?view=compare&a=t5&b=alibi&c=rope&length=512",
        "compare-length",
        ("compare-plot-0", "compare-plot-1"),
        (496, 512),
    ),
    (
        "?view=compare&a=shaw&b=deberta&c=transformer_xl&length=512",
        "compare-a-slider-0",
        ("compare-plot-0", "compare-plot-1"),
        (8, 12),
    ),
    ("?view=sentence", "sentence-head", ("sentence-plot-0", "sentence-plot-2"), (1, 2)),
    ("?view=sentence", "sentence-strength", ("sentence-plot-0", "sentence-plot-2"), (0.3, 0.6)),
]
MOVE = """async ([slider, figures, value]) => {
  const input = document.querySelector('#' + slider + ' input[type=range]');
  const drawn = figures.map(id => new Promise(done => {
    const figure = document.querySelector('#' + id + ' .js-plotly-plot');
    const finish = () => { figure.removeListener('plotly_afterplot', finish); done(performance.now()); };
    figure.on('plotly_afterplot', finish);
  }));
  const start = performance.now();
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(input, value);
  input.dispatchEvent(new Event('input', {bubbles: true}));
  return Math.max(...await Promise.all(drawn)) - start;
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("no Chromium on this machine (apt-get install chromium)", file=sys.stderr)
        return 2
    server = subprocess.Popen(
        [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", "47850"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            for query, slider, figures, values in MOVES:
                page.goto(address + query)
                page.wait_for_selector(f"#{figures[-1]} .js-plotly-plot .main-svg", state="attached")
                page.wait_for_timeout(1500)
                times = []
                for number in range(rounds + 2):
                    times.append(page.evaluate(MOVE, [slider, list(figures), str(values[number % 2])]))
                    page.wait_for_timeout(120)
                times = times[2:]
                print(f"{query:62} {slider:20} median {statistics.median(times):5.0f} ms   worst {max(times):5.0f} ms")
            browser.close()
    finally:
        server.terminate()
        server.wait(20)
    return 0


if __name__ == "__main__":
    sys.exit(main())
