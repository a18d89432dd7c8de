"""Every page in a real browser (browser.py): controls, links, languages, exports, invalid input, the keyboard."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")
pandas = pytest.importorskip("pandas")
expect = playwright.expect

from tests.explorer.browser import changed, figure, go, idle, needs_browser  # noqa: E402

pytestmark = [needs_browser, pytest.mark.slow]  # CI runs them after `make test`


def slide(page, element, value):
    """Move a slider: set its native element and dispatch an input event."""
    idle(page, element.split("-")[0])
    page.eval_on_selector(
        f"#{element} input[type=range]",
        "(e, v) => { Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(e, v);"
        " e.dispatchEvent(new Event('input', {bubbles: true})); }",
        str(value),
    )


def choose(page, element, name):
    """Choose an entry of a drop-down list."""
    page.click(f"#{element} input")
    page.click(f"[role=option][aria-label={name!r}], [role=option][data-value={name!r}]")


def expect_alert(page, key, text):
    """The page shows this error, with the role that assistive technology announces."""
    expect(page.locator(f"#{key}-status [role=alert]")).to_contain_text(text)


def test_every_page_opens_and_draws(page, address):
    go(page, address, "?view=gallery&encoding=alibi")
    assert figure(page, "gallery-plot-0")["titles"][0].startswith("alibi:")
    expect(page.locator("#gallery-html")).to_contain_text("BLOOM")
    for name, figures in (("Learn", 1), ("Compare", 2), ("Your sentence", 3), ("Extend RoPE", 2)):
        page.get_by_role("tab", name=name).click()
        key = name.split()[-1].lower().replace("rope", "extend")
        for number in range(figures):
            drawn = figure(page, f"{key}-plot-{number}")
            assert drawn["traces"] and all(t["size"] for t in drawn["traces"]), (name, number)
            assert all(drawn["titles"])
    page.get_by_role("tab", name="Results").click()
    expect_alert(page, "results", "no run here yet")


def test_the_course_can_be_walked_and_its_numbers_changed(page, address):
    go(page, address, "?view=learn")
    first = figure(page, "learn-plot-0")
    expect(page.locator("#learn-html h2")).to_have_text("1. Order is lost")
    page.click("#learn-on")
    second = changed(page, "learn-plot-0", first)
    expect(page.locator("#learn-html h2")).to_have_text("2. Sinusoidal positions")
    slide(page, "learn-number", 2)
    other = changed(page, "learn-plot-0", second)
    assert second["titles"] == other["titles"]
    expect(page.locator("#learn-link")).to_have_attribute("href", re.compile("chapter=2.*number=2"))
    page.get_by_label("8. Rotary positions").check()
    changed(page, "learn-plot-0", other)
    expect(page.locator("#learn-number input[type=number]")).to_have_value("4")  # the course's own
    go(page, address, "?view=learn&chapter=11&number=4", "zh/")
    expect(page.locator("#learn-html h2")).to_have_text("11. 按距离扣分")
    expect(page.locator("#learn-number input[type=number]")).to_have_value("4")


def test_controls_change_the_figure_s_data(page, address):
    go(page, address, "?view=gallery")
    before = figure(page, "gallery-plot-0")
    page.click("#gallery-encoding label:has-text('rope')")
    assert changed(page, "gallery-plot-0", before)["titles"][0].startswith("rope:")
    page.get_by_role("tab", name="Compare").click()
    before = figure(page, "compare-plot-1")
    slide(page, "compare-a-slider-0", 8)
    after = changed(page, "compare-plot-1", before)
    assert after["traces"][0]["sum"] != before["traces"][0]["sum"]
    assert after["traces"][1:] == before["traces"][1:]  # the other encodings stay
    choose(page, "compare-b", "shaw")
    after = changed(page, "compare-plot-1", after)
    assert after["titles"][1].startswith("shaw")
    expect(page.locator("#compare-b-slider-0 label span").first).to_have_text(
        re.compile(r"\s*max_distance\s*")
    )  # the options of shaw
    slide(page, "compare-head", 3)
    assert "head 3" in changed(page, "compare-plot-1", after)["titles"][0]


@pytest.mark.slow
def test_a_long_sequence_is_drawn_coarsely_and_then_finely(page, address):
    go(page, address, "?view=compare&a=alibi&b=rope&c=")
    before = figure(page, "compare-plot-1")
    page.evaluate(
        "() => { window.sizes = []; const figure = document.querySelector('#compare-plot-1 .js-plotly-plot');"
        " figure.on('plotly_afterplot', () => window.sizes.push(figure._fullData[0].z.length)); }"
    )
    slide(page, "compare-length", 4096)
    changed(page, "compare-plot-1", before)
    assert list(dict.fromkeys(page.evaluate("() => window.sizes"))) == [64, 187]


@pytest.mark.slow
def test_long_work_shows_progress(page, address):
    go(page, address, "?view=gallery")
    before = figure(page, "gallery-plot-0")
    progress, view = page.locator("#gallery-progress"), page.locator(".view[data-page=gallery]")
    expect(progress).to_be_hidden()
    held = []
    page.route("**/draw", lambda route: held.append(route))
    page.click("#gallery-encoding label:has-text('alibi')")
    expect(progress).to_be_visible()
    expect(progress).to_have_attribute("role", "progressbar")
    expect(view).to_have_attribute("aria-busy", "true")
    for route in held:
        route.continue_()
    changed(page, "gallery-plot-0", before)
    expect(progress).to_be_hidden()


@pytest.mark.slow
def test_the_animation_grows_past_the_training_length(page, address):
    go(page, address, "?view=compare&a=alibi&b=&c=&train=16&length=512")
    page.evaluate(
        "() => { window.lengths = []; const draw = posenc.draw;"
        " posenc.draw = (key, values) => { window.lengths.push(values.at(-6)); return draw(key, values); }; }"
    )
    page.click("#compare-play")
    page.wait_for_function("() => location.search.includes('length=128')")  # eight times the training length
    lengths = page.evaluate("() => window.lengths")
    assert lengths[0] == 16 and lengths == sorted(lengths) and any(16 < length < 128 for length in lengths)


def test_a_link_restores_its_view(page, address):
    go(page, address, "?view=compare&a=t5&b=alibi&c=&length=128")
    before = figure(page, "compare-plot-1")
    slide(page, "compare-a-slider-0", 12)
    after = changed(page, "compare-plot-1", before)
    link = "?view=compare&a=t5:buckets=12&c=&length=128"
    expect(page.locator("#compare-link")).to_have_attribute("href", link)
    page.wait_for_function("link => location.search === link", arg=link)
    go(page, address, link)
    assert figure(page, "compare-plot-1") == after
    expect(page.locator("#compare-a-slider-0 input[type=number]")).to_have_value("12")
    expect(page.get_by_role("tab", name="Compare")).to_have_attribute("aria-selected", "true")


def test_languages_switch_and_keep_the_view(page, address):
    go(page, address, "?view=extend&scaling=linear&target=8192")
    english = figure(page, "extend-plot-0")
    assert "pairs do not complete a rotation" in english["titles"][0]
    page.click("a.switch")
    page.wait_for_url("**/zh/**")
    chinese = figure(page, "extend-plot-0")
    assert "转不满一圈" in chinese["titles"][0]
    assert [t["sum"] for t in chinese["traces"]] == [t["sum"] for t in english["traces"]]
    expect(page.get_by_role("tab", name="你的句子")).to_have_count(1)
    expect(page.locator("#extend-target input")).to_have_value("8192")
    page.click("a.switch")
    page.wait_for_url(re.compile(re.escape(address) + r"\?view=extend"))
    assert figure(page, "extend-plot-0") == english
    expect(page.locator("h1")).to_have_text("posenc explorer")


@pytest.mark.slow
def test_invalid_input_gets_a_sentence_and_unusual_text_is_drawn(page, address):
    go(page, address, "?view=sentence")
    before = figure(page, "sentence-plot-2")
    page.fill("#sentence-text textarea", "")
    expect_alert(page, "sentence", "no tokens")
    expect(page.locator("#sentence-plot-2")).to_be_hidden()  # figures of another text next to the error would mislead
    page.eval_on_selector(
        "#sentence-text textarea",
        "e => { e.value = 'a'.repeat(1e6); e.dispatchEvent(new Event('input', {bubbles: true})); }",
    )
    expect_alert(page, "sentence", "1,000,000")
    page.fill("#sentence-text textarea", "שלום עולם 👩‍👩‍👧 <b>x</b> مرحبا")
    assert changed(page, "sentence-plot-2", before)["traces"]
    expect(page.locator("#sentence-html")).to_contain_text("שלום")
    expect(page.locator("#sentence-html b")).to_have_count(0)
    expect(page.locator("#sentence-status [role=alert]")).to_have_count(0)
    go(page, address, "?view=compare&a=t5:buckets=7&b=&c=")
    expect_alert(page, "compare", "buckets")
    go(page, address, "?view=extend&target=many")
    expect_alert(page, "extend", "number")
    assert "Traceback" not in page.content()


def test_code_and_exports(page, address):
    go(page, address, "?view=extend&scaling=ntk&target=8192")
    drawn = figure(page, "extend-plot-0")
    expect(page.locator("#extend-json")).to_contain_text("rope_theta")
    page.click("#extend-code summary")
    expect(page.locator("#extend-code pre")).to_be_visible()
    expect(page.locator("#extend-code pre")).to_contain_text("posenc.scaling.NTK(factor=2.0)")
    page.click("#extend-csv summary")
    tables = page.locator("#extend-csv a")
    assert [title.split(". ")[0] for title in tables.all_inner_texts()] == ["1", "2", "3"]  # one for each panel
    assert drawn["titles"][0] in tables.first.inner_text()
    with page.expect_download() as waiting:
        tables.first.click()
    assert waiting.value.suggested_filename == "posenc-extend-1.csv"
    table = pandas.read_csv(waiting.value.path())
    assert table.shape == (64, 3) and list(table.columns[1:]) == [t["name"] for t in drawn["traces"]]
    pictures = []
    page.on("download", lambda picture: pictures.append(picture))
    page.click("#extend-png")
    while len(pictures) < 2:  # one for each figure
        page.wait_for_event("download")
    assert {picture.suggested_filename for picture in pictures} == {"posenc-extend-1.png", "posenc-extend-2.png"}
    for picture in pictures:
        assert Path(picture.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_pasted_configuration_fills_the_form_and_one_without_rotation_clears_it(page, address):
    go(page, address, "?view=extend")
    before = figure(page, "extend-plot-0")
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama = {"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": rope}
    page.fill("#extend-config textarea", json.dumps(llama))
    changed(page, "extend-plot-0", before)
    expect(page.locator("#extend-target input")).to_have_value("131072")
    expect(page.locator("#extend-options textarea, #extend-options input").first).to_have_value("factor=8.0")
    page.wait_for_function("() => document.querySelector('#extend-json')?.textContent.includes('131072')")
    shown = json.loads(page.locator("#extend-json").text_content())
    assert shown["max_position_embeddings"] == 131072 and shown["rope_parameters"] == rope | {"rope_theta": 500000.0}
    expect(page.locator("#extend-html")).to_contain_text("no differences")
    page.fill("#extend-target input", "262144")  # a change by the user: the factor follows
    page.wait_for_function("() => document.querySelector('#extend-json')?.textContent.includes('\"factor\": 32.0')")
    differs = page.locator("#extend-compared .differs")
    expect(differs).to_have_count(2)
    names = [row.split("\t")[0].removeprefix("≠ ") for row in differs.all_inner_texts()]
    assert names == ["rope_parameters.factor", "max_position_embeddings"]
    link = page.get_attribute("#extend-link", "href")
    go(page, address, link)  # the user's change stays, beside the pasted configuration
    expect(page.locator("#extend-target input")).to_have_value("262144")
    expect(page.locator("#extend-config textarea")).to_have_value(re.compile("131072"))
    expect(page.locator("#extend-compared .differs")).to_have_count(2)
    choose(page, "extend-model", "Phi-3 mini 4k")  # another model replaces it
    expect(page.locator("#extend-head_dim input")).to_have_value("96")
    expect(page.locator("#extend-config textarea")).to_have_value("")
    expect(page.locator("#extend-compared")).to_have_count(0)
    page.fill("#extend-base input", "20000")  # no longer that model
    expect(page.locator("#extend-model input")).to_have_value(re.compile("other"))
    page.fill(
        "#extend-config textarea", json.dumps({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12})
    )
    expect_alert(page, "extend", "no rotation")
    expect(page.locator("#extend-message")).to_contain_text("no rotation")
    expect(page.locator("#extend-base input")).to_have_value("")
    expect(page.locator("#extend-json")).to_have_count(0)
    expect(page.locator("#extend-plot-0")).to_be_hidden()


def test_another_origin_is_refused(context, address):
    """The browser sends the request of a foreign page, with its origin."""
    window = context.new_page()
    with window.expect_response(address + "draw") as waiting:
        window.evaluate("url => void fetch(url, {method: 'POST', mode: 'no-cors', body: '{}'})", address + "draw")
    assert waiting.value.status == 403
    window.close()


@pytest.mark.slow
def test_the_keyboard_is_enough(page, address):
    go(page, address, "?view=gallery")
    page.get_by_role("tab", name="Gallery").focus()
    for _ in range(6):
        if page.evaluate("document.activeElement.innerText") == "Compare":
            break
        page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Compare")).to_be_focused()
    page.keyboard.press("Enter")
    before = figure(page, "compare-plot-1")
    page.focus("#compare-head input[type=range]")
    page.keyboard.press("ArrowRight")
    after = changed(page, "compare-plot-1", before)
    assert "head 1" in after["titles"][0]
    expect(page.locator("#compare-head input[type=range]")).to_be_focused()
    expect(page.locator("#compare-head input[type=range]")).not_to_have_css("outline-style", "none")


@pytest.fixture(scope="module", params=["written here", pytest.param("of the lab", marks=pytest.mark.slow)])
def run(request, tmp_path_factory, tiny_run):
    """A run in the lab's format with a report of one figure, and a real one: the smallest preset."""
    folder = tmp_path_factory.mktemp("run") / "smoke"
    if request.param == "written here":
        shutil.copytree(tiny_run, folder)
        figure = "<div class='js-plotly-plot'></div><script>document.querySelector('div').innerHTML = '<svg class=main-svg></svg>'</script>"
        (folder / "report.html").write_text(f"<!doctype html><title>tiny</title><h1>tiny</h1>{figure}")
        return folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posenc", "compare", "--preset", "smoke", "--out", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_run_of_the_lab_is_opened_and_its_report_browsed(page, address, run):
    go(page, address, "?view=results")
    expect_alert(page, "results", "no run here yet")
    page.fill("#results-run input", str(run))
    page.keyboard.press("Enter")
    page.wait_for_selector("#results-plot-0 .js-plotly-plot", state="attached")
    drawn = figure(page, "results-plot-0")
    rows = json.loads((run / "results.json").read_text())["rows"]
    assert {t["name"] for t in drawn["traces"]} == {row["encoding"] for row in rows}
    assert any(row["task"] in drawn["titles"][0] for row in rows)
    page.click("#results-html .whole-report summary")
    report = page.frame_locator("#results-html iframe")
    report.locator("h1").first.wait_for()
    report.locator("svg").first.wait_for(state="attached")  # scripts of the report run in the sandbox
    expect(page.locator("#results-run input")).to_have_value(str(run))
    link = page.get_attribute("#results-link", "href")
    go(page, address, link)
    assert figure(page, "results-plot-0") == drawn
    with page.expect_popup() as waiting:
        page.click("#results-html .whole-report summary")
        page.click("#results-html .whole-report a")
    waiting.value.wait_for_selector("h1")
    waiting.value.close()


NAMELESS = """() => Array.from(document.querySelectorAll('input, textarea, select, button, a[href], iframe'))
  .filter(e => e.checkVisibility() && e.offsetParent !== null && e.type !== 'hidden' && !e.closest('.modebar'))
  .filter(e => {
    const named = e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.title || e.alt
      || (e.labels && Array.from(e.labels).map(l => l.innerText).join('')) || e.innerText || e.placeholder;
    return !(named || '').trim();
  }).map(e => e.outerHTML.slice(0, 160))"""


@pytest.mark.slow
def test_everything_has_a_name_for_assistive_technology(page, address):
    go(page, address, "?view=gallery")
    tabs = {"gallery": "Gallery", "learn": "Learn", "compare": "Compare", "sentence": "Your sentence", "extend": "Extend RoPE", "results": "Results"}  # fmt: skip
    for key, name in tabs.items():
        page.get_by_role("tab", name=name).click()
        idle(page, key)
        assert page.evaluate(NAMELESS) == []
    expect(page.locator("h1")).to_have_count(1)
    page.get_by_role("tab", name="Compare").click()
    status = page.locator("#compare-status")
    expect(status).to_have_attribute("aria-live", "polite")
    expect(status).to_contain_text("head 0")  # the titles
