"""Every page as people see it, on a laptop and on a phone, in both languages: screenshots under tests/artefacts, and nothing
that overlaps, is cut off, or is too faint to read (screen_checks.js).
"""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("gradio")
pytest.importorskip("playwright.sync_api")

from tests.explorer.browser import PATIENCE, go, idle, needs_browser
from tests.explorer.conftest import watched
from tests.lab.test_report_browser import axe  # noqa: F401  (a fixture)

pytestmark = [needs_browser, pytest.mark.slow]  # `make check` runs them
ROOT = Path(__file__).parents[2]
CHECKS = Path(__file__).with_name("screen_checks.js").read_text(encoding="utf-8")
LAPTOP, PHONE = (1280, 800), (390, 844)
SCREENS = [
    pytest.param((LAPTOP, "en"), id="1280-en"),
    pytest.param((PHONE, "zh"), id="390-zh"),
    pytest.param((LAPTOP, "zh"), id="1280-zh", marks=pytest.mark.slow),
    pytest.param((PHONE, "en"), id="390-en", marks=pytest.mark.slow),
]
LLAMA = '{"head_dim":128,"rope_theta":500000.0,"max_position_embeddings":131072,"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}}'
VIEWS = {
    "gallery": "?view=gallery",
    "gallery-xpos": "?view=gallery&encoding=xpos",
    "learn": "?view=learn&chapter=8&number=6",
    "learn-terms": "?view=learn&chapter=5",
    "learn-slopes": "?view=learn&chapter=11",
    "compare": "?view=compare",
    "compare-untrained": "?view=compare&a=shaw&b=deberta&c=none&scale=own&axis=log&colours=shared",
    "sentence": "?view=sentence&encoding=rope&text=猫坐在垫子上，因为垫子很暖和",
    "extend": f"?view=extend&head_dim=128&base=500000&original=8192&target=262144&scaling=llama3&config={LLAMA}",
    "results": f"?view=results&run={ROOT / 'docs/results/quick'}",
}
VARIANTS = ("gallery-xpos", "learn-terms", "learn-slopes", "compare-untrained")


@pytest.fixture(params=SCREENS)
def screen(request, browser):
    """(a window of one size in one language, the size, the language)."""
    (width, height), language = request.param
    tag = {"en": "en-US", "zh": "zh-CN"}[language]
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, locale=tag, has_touch=width < 600, is_mobile=width < 600)
    context.set_default_timeout(PATIENCE)
    for window in watched(context):
        yield window, (width, height), language
    context.close()


def check_views(screen, address, names):
    page, (width, height), language = screen
    folder = ROOT / "tests" / "artefacts"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        key = go(page, address, VIEWS[name])
        assert page.url.startswith(f"{address}zh/") == (language == "zh")  # the browser's language
        page.screenshot(path=folder / f"explorer-{name}-{width}-{language}.png", full_page=True)
        found = page.evaluate(CHECKS)
        assert found == {"overlaps": [], "clipped": [], "contrast": [], "wide": 0}, (name, found)
        plot, controls = page.locator(f"#{key}-plot-0"), page.locator(f"#{key}-controls")
        if width < 600 and key != "results":  # figures first, the settings after them
            top = plot.bounding_box()["y"]
            assert top < height / 2 and controls.bounding_box()["y"] > top, name


@pytest.mark.slow
def test_nothing_overlaps_in_further_views(screen, address):
    check_views(screen, address, VARIANTS)


def test_nothing_overlaps_is_cut_off_or_too_faint(screen, address):
    check_views(screen, address, [name for name in VIEWS if name not in VARIANTS])
    page, (width, height), _ = screen
    answer = page.locator(".lab .answers strong").all()
    last = answer[0].bounding_box() if width < 600 else answer[-1].bounding_box()
    assert last["y"] + last["height"] < height  # the answer of the run is inside the first screen
    assert re.search(r"alibi|shaw|t5", answer[0].inner_text() + answer[1].inner_text())


def test_a_first_visit_is_in_the_browser_s_language_and_the_switch_is_remembered(browser, address):
    context = browser.new_context(locale="zh-CN", viewport={"width": 800, "height": 600})
    context.set_default_timeout(PATIENCE)
    for page in watched(context):
        page.goto(address + "?view=extend&scaling=linear")
        page.wait_for_url(f"{address}zh/?view=extend&scaling=linear")
        idle(page, "extend")
        page.click("a.switch")
        page.wait_for_url(re.compile(re.escape(address) + r"\?view=extend"))
        idle(page, "extend")
        page.goto(address)
        idle(page, "gallery")
        assert page.url.startswith(address + "?") or page.url == address
        assert page.evaluate("document.documentElement.lang") == "en"
    context.close()


def test_the_newest_run_is_open(tmp_path, monkeypatch):
    """The page of results without a run in its link: the newest one near the server."""
    import os

    from posenc.explorer.pages import PAGES
    from posenc.explorer.texts import LANGUAGES

    monkeypatch.chdir(tmp_path)
    for age, name in ((100, "older"), (0, "newer")):
        shutil.copytree(ROOT / "docs/results/quick", tmp_path / "out" / name)
        for file in (tmp_path / "out" / name).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    page = PAGES["results"]
    view = page.draw(page.complete({}), LANGUAGES["zh"])
    assert "newer" in view.html and "older" not in view.html
    assert "alibi" in view.html and "训练长度" in view.html


FAULTS = """<!doctype html><style>body { background: #fff; margin: 0 } p { margin: 0 }</style>
<p style="position: absolute; top: 10px; color: #bbb">faint</p>
<p style="position: absolute; top: 60px; left: 0">one text</p><p style="position: absolute; top: 60px; left: 20px">another</p>
<p style="position: absolute; top: 90px; width: 1000px">wide</p>
<div class="plot" style="position: absolute; top: 150px; width: 100px; height: 50px"><svg width="100" height="50">
  <text x="10" y="20">title</text><text x="10" y="24">legend</text><text x="80" y="45">cut off</text></svg></div>"""


def test_the_checks_find_faults(context):
    window = context.new_page()
    window.set_viewport_size({"width": 600, "height": 400})
    window.set_content(FAULTS)
    found = window.evaluate(CHECKS)
    window.close()
    assert found["wide"] == 400
    assert [text.split(" <")[0] for text in found["clipped"]] == ["cut off"]
    assert ["faint" in text for text in found["contrast"]] == [True]
    assert sorted(re.sub(r" <[^>]*>", "", pair) for pair in found["overlaps"]) == [
        "one text / another",
        "title / legend",
    ]


@pytest.mark.slow
def test_axe_core_finds_nothing_in_what_is_ours(screen, address, axe):  # noqa: F811
    """Every rule of axe-core on the views; contrast of everything, and the rest outside Gradio's own components."""
    page, (width, _), language = screen
    if (width < 600) != (language == "zh"):
        pytest.skip("one language on each screen")
    for name in ("gallery", "learn", "compare", "extend", "results"):
        go(page, address, VIEWS[name])
        page.evaluate(axe)
        contrast = page.evaluate("axe.run({runOnly: ['color-contrast']})")
        ours = page.evaluate("axe.run('.view, header.top', {resultTypes: ['violations']})")
        for found in (contrast, ours):
            assert [(v["id"], [node["html"][:120] for node in v["nodes"]]) for v in found["violations"]] == [], name
        assert contrast["passes"]
