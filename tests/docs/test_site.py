"""The built site in a browser, opened from files: search, languages, figures, formulas, phones, and no request elsewhere."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the extra dev")
from docs.site import check

SITE = Path(__file__).parents[2] / "out" / "site"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="there is no site; make docs builds it"),
]


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser):
    """A page that fails the test for an error in its console and for a request to another machine."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    faults: list[str] = []
    opened.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on(
        "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or faults.append(request.url)
    )
    yield opened
    opened.close()
    assert not faults


def go(page, name):
    page.goto((SITE / name).as_uri())


def test_links_and_anchors_lead_somewhere():
    assert check.faults(SITE) == []


@pytest.mark.parametrize(
    ("start", "query", "expected"), [("index.html", "bucket", "bucket"), ("zh/index.html", "旋转", "旋转")]
)
def test_search(page, start, query, expected):
    go(page, start)
    page.focus(".md-search__input")
    page.keyboard.insert_text(query)
    page.keyboard.press("End")  # the search listens to keys
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    shown = page.inner_text(".md-search-result__list").replace("\u200b", "")
    assert expected in shown.lower()


def test_the_language_switch_keeps_the_page(page):
    go(page, "course/08-rope.html")
    assert "Rotary positions" in page.inner_text("h1")
    page.hover(".md-select")
    page.click(".md-select__link[hreflang=zh]")
    page.wait_for_url("**/zh/course/08-rope.html")
    assert "旋转位置编码" in page.inner_text("h1")
    page.hover(".md-select")
    page.click(".md-select__link[hreflang=en]")
    page.wait_for_url(lambda address: address.endswith("/site/course/08-rope.html"))


@pytest.mark.parametrize("name", ["course/02-sinusoidal.html", "zh/course/10-yarn.html", "encodings/t5.html"])
def test_figures_and_formulas_render(page, name):
    go(page, name)
    page.wait_for_function("[...document.images].every(i => i.complete && i.naturalWidth > 0)", timeout=60_000)
    assert page.evaluate("document.querySelectorAll('.md-content img').length") > 0
    if "course" in name:
        page.wait_for_function(
            "document.querySelectorAll('.arithmatex').length > 5 && "
            "[...document.querySelectorAll('.arithmatex')].every(e => e.querySelector('mjx-container svg'))",
            timeout=60_000,
        )
        assert page.evaluate("document.querySelectorAll('mjx-merror').length") == 0


def test_plots_are_drawn(page):
    go(page, "results/lab-results.html")
    page.wait_for_function("document.querySelectorAll('.posenc-plot .main-svg').length >= 2", timeout=60_000)


@pytest.mark.parametrize("name", [
    "index.html", "zh/index.html", "start/layer.html", "zh/course/06-t5.html", "encodings/rope.html", "zh/encodings/axial.html",
    "guides/choose.html", "zh/guides/rotary.html", "api/layers.html", "zh/api/plans.html", "results/benchmarks.html",
    "zh/results/lab.html", "project/contributing.html", "zh/project/design.html", "notebooks/see-an-encoding.html",
])  # fmt: skip
def test_a_phone_shows_it_without_scrolling_sideways(page, name):
    page.set_viewport_size({"width": 390, "height": 800})
    go(page, name)
    page.wait_for_load_state("load")
    page.wait_for_function("[...document.images].every(i => i.complete)", timeout=60_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_dark_scheme(page):
    page.emulate_media(color_scheme="dark")
    go(page, "encodings/rope.html")
    assert page.get_attribute("body", "data-md-color-scheme") == "slate"
