"""Generate the figures of the README: `make figures` writes them to docs/figures.

encodings.png   contribution of position to the score, for six encodings (posenc.plot)
explorer.png    a screenshot of the explorer (posenc explore); needs Chromium
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from posenc.plot import analysis, canvas, panels

FOLDER = Path(__file__).parent / "figures"
DRAWN = ("t5", "alibi", "rope", "transformer_xl", "sinusoidal", "learned")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
VIEW = "?view=compare&a=t5&b=alibi&c=rope&length=512"


def encodings() -> Path:
    drawn = [panel for name in DRAWN for panel in panels.kernel(analysis.subject(name), 96)]
    return canvas.save(canvas.figure(drawn, columns=3), FOLDER / "encodings.png")


def explorer() -> Path | None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("explorer.png is unchanged: no Chromium on this machine", file=sys.stderr)
        return None
    from playwright.sync_api import sync_playwright

    server = subprocess.Popen(
        [sys.executable, "-m", "posenc", "explore", "--no-open", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 1180})
            page.goto(address + VIEW)
            page.wait_for_selector(".view[data-page=compare][aria-busy=false]", timeout=60_000)
            page.wait_for_function("document.fonts.ready.then(() => true)")
            path = FOLDER / "explorer.png"
            page.screenshot(path=path)
            browser.close()
        return path
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    for path in (encodings(), explorer()):
        if path is not None:
            print(path)
