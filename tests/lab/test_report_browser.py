"""The report in a real browser, on a laptop's and a phone's screen, in both languages. Screenshots are kept in
tests/artefacts (or $POSENC_ARTEFACTS), which git ignores."""

import contextlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from posenc.lab import compare_runs, report, results

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")

ROOT = Path(__file__).parents[2]
ARTEFACTS = Path(os.environ.get("POSENC_ARTEFACTS") or ROOT / "tests" / "artefacts")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SCREENS = {"laptop": (1280, 800), "phone": (390, 844)}
PATIENCE = 120_000

# Every visible piece of text with its boxes on the page, its colour and the colour behind it
TEXTS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || ['SCRIPT', 'STYLE', 'title'].includes(element.tagName) || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const style = getComputedStyle(element), inside = element.closest('svg');
    let behind = 'rgb(255, 255, 255)';
    for (let up = element; up; up = up.parentElement) {
      const colour = getComputedStyle(up).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)' && colour !== 'transparent') { behind = colour; break; }
    }
    const rects = inside ? [element.getBoundingClientRect()] : Array.from(range.getClientRects());
    found.push({
      text: node.data.trim(), colour: inside ? style.fill : style.color, behind,
      size: parseFloat(style.fontSize) * (inside ? inside.getBoundingClientRect().width / inside.viewBox.baseVal.width : 1),
      bold: parseInt(style.fontWeight) >= 700, scrolled: !!element.closest('.scroll, pre'),
      boxes: rects.filter(r => r.width > 0 && r.height > 0)
        .map(r => [r.left + scrollX, r.top + scrollY, r.right + scrollX, r.bottom + scrollY]),
    });
  }
  return found;
}"""
FIGURES = """() => Array.from(document.querySelectorAll('svg')).filter(s => s.checkVisibility()).map(svg => {
  const outer = svg.getBoundingClientRect();
  const parts = Array.from(svg.querySelectorAll('text, path, rect')).map(p => p.getBoundingClientRect())
    .filter(r => r.width || r.height);
  return {
    left: outer.left, right: outer.right, width: outer.width, parts: parts.length,
    outside: Math.max(...parts.map(r => Math.max(outer.left - r.left, r.right - outer.right, outer.top - r.top, r.bottom - outer.bottom))),
  };
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{name: file} of the reports of the runs in docs, and of their comparison."""
    folder = tmp_path_factory.mktemp("reports")
    runs = {name: results.read(ROOT / "docs" / "results" / name) for name in ("quick", "paper")}
    made = {name: report.as_html(run) for name, run in runs.items()}
    made["compare"] = compare_runs.as_html(runs["quick"], runs["paper"], ["out/quick", "out/paper"])
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=PATIENCE)
        yield made
        made.close()


@pytest.fixture
def show(browser, pages):
    """Open a report; at the end its console must be free of messages, and it must have asked for nothing else."""
    opened, complaints, requests = [], [], []

    def go(name, screen="laptop", language="en", **more):
        width, height = SCREENS[screen]
        made = browser.new_page(viewport={"width": width, "height": height}, **more)
        made.set_default_timeout(PATIENCE)
        made.on("console", lambda message: complaints.append(message.text))
        made.on("pageerror", lambda error: complaints.append(str(error)))
        made.on("request", lambda request: requests.append(request.url))
        made.goto(pages[name].as_uri() + (f"#{language}" if language else ""))
        opened.append(made)
        return made

    yield go
    for page in opened:
        page.close()
    assert complaints == [] and len(requests) == len(opened)


EVERY = [(screen, language) for screen in SCREENS for language in ("en", "zh")]


@pytest.mark.parametrize("name", ["quick", "paper"])
@pytest.mark.parametrize(("screen", "language"), EVERY)
def test_the_answer_is_on_the_first_screen(show, name, screen, language):
    page = show(name, screen, language)
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"report-{name}-{screen}-{language}.png")
    width, height = SCREENS[screen]
    answers = page.locator(f"main.{language} .answers strong")
    run = results.read(ROOT / "docs" / "results" / name)
    assert answers.count() == 3 + (run.finished < run.wanted)  # an unfinished run says so first
    for answer in answers.all():
        box = answer.bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= height and box["x"] + box["width"] <= width
        assert int(answer.evaluate("e => getComputedStyle(e).fontWeight")) >= 700
    assert page.locator("main:visible").count() == 1
    assert page.evaluate("document.documentElement.lang") == ("zh-Hans" if language == "zh" else "en")
    figure = page.locator(f"main.{language} svg").first.bounding_box()
    assert figure["y"] < height  # it begins on the first screen


@pytest.mark.parametrize("name", ["quick", "paper", "compare"])
@pytest.mark.parametrize(("screen", "language"), EVERY)
def test_nothing_overlaps_is_clipped_or_faint(show, name, screen, language):
    """With every part of the page unfolded."""
    page = show(name, screen, language)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.screenshot(path=ARTEFACTS / f"report-{name}-{screen}-{language}-whole.png", full_page=True)
    width = SCREENS[screen][0]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    texts = page.evaluate(TEXTS)
    assert len(texts) > 50
    assert overlaps(texts) == []
    faint = [(t["text"], t["colour"], t["behind"]) for t in texts if ratio(t) < (3 if is_large(t) else 4.5)]
    assert faint == []
    assert [(t["text"], t["size"]) for t in texts if t["size"] < 9.5] == []
    cut = [t["text"] for t in texts if not t["scrolled"] for box in t["boxes"] if box[0] < 0 or box[2] > width + 0.5]
    assert cut == []
    figures = page.evaluate(FIGURES)
    assert figures and all(f["parts"] > 20 for f in figures)
    for figure in figures:
        assert figure["left"] >= 0 and figure["right"] <= width and figure["outside"] <= 1.5, figure


@pytest.mark.parametrize("screen", SCREENS)
def test_the_verdicts_are_visible_without_scrolling_aside(show, screen):
    page = show("quick", screen)
    page.evaluate("document.querySelectorAll('main.en details').forEach(d => { d.open = true; })")
    width = SCREENS[screen][0]
    for table in page.locator("main.en table:has(.verdict):visible").all():
        boxes = table.locator("td.verdict:not(.wide)").evaluate_all(
            "cells => cells.map(c => c.getBoundingClientRect().right)"
        )
        assert boxes and max(boxes) <= width
    small = page.locator("main.en .scroll:has(table.small)").first
    assert small.evaluate("e => e.scrollWidth <= e.clientWidth")  # all of it is visible


def test_one_switch_changes_the_language(show):
    page = show("quick", "phone", None, locale="zh-CN")
    assert page.locator("main.zh").is_visible()  # the browser's language on the first visit
    page.get_by_text("English", exact=True).click()
    assert page.locator("main.en").is_visible() and not page.locator("main.zh").is_visible()
    assert page.evaluate("document.documentElement.lang") == "en"
    page.keyboard.press("Tab")
    page.focus("#lang-en")
    page.keyboard.press("ArrowRight")
    assert page.locator("main.zh").is_visible() and page.evaluate("document.documentElement.lang") == "zh-Hans"


def test_a_line_stands_out_when_it_is_pointed_at(show):
    page = show("quick")
    line = page.locator("main.en svg .line").nth(2)
    line.locator("text").hover()
    fade = "g => getComputedStyle(g).opacity"
    assert line.evaluate(fade) == "1" and page.locator("main.en svg .line").nth(3).evaluate(fade) == "0.15"


@pytest.fixture(scope="module")
def axe():
    """axe-core, from $POSENC_AXE (axe.min.js) or by npm into the folder of artefacts."""
    script = Path(os.environ.get("POSENC_AXE") or ARTEFACTS / "package" / "axe.min.js")
    if not script.exists() and shutil.which("npm"):
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["npm", "pack", "axe-core@4"], cwd=ARTEFACTS, check=True, capture_output=True, timeout=60)
            for archive in ARTEFACTS.glob("axe-core-*.tgz"):
                with tarfile.open(archive) as file:
                    file.extract("package/axe.min.js", ARTEFACTS, filter="data")
    if not script.exists():
        pytest.skip("no axe-core: give its axe.min.js in POSENC_AXE, or install npm")
    return script.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "screen", "language"), [("quick", "laptop", "en"), ("quick", "phone", "zh"), ("compare", "phone", "en")]
)
def test_axe_core_finds_nothing(show, axe, name, screen, language):
    """It cannot judge the colours of SVG text, which the test above does."""
    page = show(name, screen, language)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert [(v["id"], [node["html"][:100] for node in v["nodes"]]) for v in found["violations"]] == []
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}


def overlaps(texts):
    """Pairs of texts whose boxes share more than two pixels each way: lines of one paragraph may touch."""
    boxes = [(box, number) for number, text in enumerate(texts) if not text["scrolled"] for box in text["boxes"]]
    boxes.sort(key=lambda entry: entry[0][1])
    found = []
    for at, (a, first) in enumerate(boxes):
        for b, second in boxes[at + 1 :]:
            if b[1] >= a[3] - 2:
                break
            if first != second and min(a[2], b[2]) - max(a[0], b[0]) > 2:
                found.append((texts[first]["text"], texts[second]["text"]))
    return found


def channels(colour):
    parts = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")]
    return [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in parts[:3]]


def ratio(text):
    """The contrast of WCAG 2."""
    both = [sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), channels(text[key]))) for key in ("colour", "behind")]
    return (max(both) + 0.05) / (min(both) + 0.05)


def is_large(text):
    return text["size"] >= 24 or (text["bold"] and text["size"] >= 18.66)


def test_the_checks_find_faults():
    one = {"text": "a", "scrolled": False, "boxes": [[0, 0, 20, 20]]}
    assert overlaps([one, {**one, "text": "b", "boxes": [[10, 10, 30, 30]]}]) == [("a", "b")]
    assert overlaps([one, {**one, "boxes": [[0, 20, 20, 40]]}]) == []
    assert ratio({"colour": "rgb(119, 119, 119)", "behind": "rgb(255, 255, 255)"}) == pytest.approx(4.48, abs=0.01)
