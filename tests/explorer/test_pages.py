"""Each page as a function of its state: drawn values, code, sentences for invalid input."""

import ast
import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gradio")

import posenc
from posenc.core import documentation
from posenc.encodings import spec
from posenc.encodings.registry import OWN_ATTENTION
from posenc.encodings.rope.configs import read
from posenc.explorer import pages, render, url_state
from posenc.explorer.pages import PAGES, compare, descriptions, extend, pasted_config, results, sentence
from posenc.explorer.pages.chapters import CHAPTERS
from posenc.explorer.pages.option_controls import options_of
from posenc.explorer.plotly_figures import as_json, mosaic, subplots
from posenc.explorer.texts import BOTH, LANGUAGES
from posenc.plot import analysis, course
from posenc.plot.panels import Heat, Lines
from posenc.plot.translations import CHINESE, ENGLISH
from tests.explorer import views

EN, ZH = LANGUAGES["en"], LANGUAGES["zh"]
SOURCE = Path(render.__file__).parent


def draw(key, words=EN, **given):
    page = PAGES[key]
    return page.draw(page.complete({name: str(value) for name, value in given.items()}), words)


def run(code):
    names = {}
    exec(code, names)
    return names


# ---- drawn values and the code next to them ----------------------------------------------------------
@pytest.mark.parametrize("name", posenc.list_encodings())
def test_the_gallery_s_code_makes_the_drawn_kernel(name):
    view = draw("gallery", encoding=name)
    kernel = next(p for p in view.panels() if isinstance(p, Heat) and p.x_label == EN("key j"))
    assert len(view.code.splitlines()) <= 6
    scores = run(view.code)["scores"].detach()[0]
    # FIRE's network has a row for each distance in the code and for each pair in the drawing: two float32 products, each a sum of 32 terms
    # in an order of its own, whose sizes add up to less than 2
    rounding = 2 * 32 * 2 * 2.0**-24 if name == "fire" else 1e-9
    drawn = scores.masked_fill(scores.isinf(), torch.nan)  # inf: masked
    np.testing.assert_allclose(kernel.z, drawn, rtol=1e-7, atol=rounding)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_the_gallery_shows_the_weights_of_attention_of_its_own(name):
    for words in (EN, ZH):
        view = draw("gallery", words, encoding=name)
        heat, lines = view.panels()
        weights = run(view.code)["weights"]
        np.testing.assert_allclose(heat.z, weights[0], atol=1e-6)
        assert not np.triu(heat.z, 1).any()  # causal
        assert (weights.sum(-1) <= 1 + 1e-5).all()
        assert name in lines.series and OWN_ATTENTION[name].formula in view.html.replace("&#x27;", "'")
    assert descriptions.describe(name, "zh").when != descriptions.describe(name, "en").when


@pytest.mark.parametrize("number", range(1, len(CHAPTERS) + 1))
def test_a_chapter_s_code_makes_its_drawn_values_and_the_number_changes_them(number):
    chapter = CHAPTERS[number - 1]
    first = draw("learn", chapter=number)
    views = [first, *(draw("learn", chapter=number, number=f"{n:g}") for n in (chapter.low, chapter.high))]
    for view in views:
        values = np.asarray(torch.as_tensor(run(view.code)["drawn"]).double())
        drawn = [z for p in view.panels() for z in ([p.z] if isinstance(p, Heat) else p.series.values())]
        assert all(len(y) == len(p.x) for p in view.panels() if isinstance(p, Lines) for y in p.series.values())
        assert any(z.shape == values.shape and np.allclose(z, values, atol=1e-5, equal_nan=True) for z in drawn)
    assert (
        len({str([(p.z if isinstance(p, Heat) else list(p.series.values())) for p in v.panels()]) for v in views}) > 1
    )
    assert chapter.title[0] in first.html and f"course/{chapter.page}.html" in first.html
    chinese = draw("learn", ZH, chapter=number)
    assert chapter.title[1] in chinese.html and f"zh/course/{chapter.page}.html" in chinese.html
    assert all(re.search(r"[\u4e00-\u9fff]", p.title + p.x_label + p.y_label) for p in chinese.panels())
    assert [p.title for p in first.panels()] == [p.title for make in chapter.figures for p in make(chapter.start)]


def test_the_chapters_are_those_of_the_course():
    docs = Path(__file__).parents[2] / "docs"
    assert [c.page for c in CHAPTERS] == sorted(path.stem for path in (docs / "en" / "course").glob("[0-9]*.md"))
    for number, chapter in enumerate(CHAPTERS, 1):
        for title, language in zip(chapter.title, ("en", "zh"), strict=True):
            text = (docs / language / "course" / f"{chapter.page}.md").read_text(encoding="utf-8")
            assert text.startswith(f"# {number}. {title}")
            assert all(f"(figure:{make.__name__.replace('_', '-')})" in text for make in chapter.figures)


def test_the_published_losses_are_those_of_the_run():
    pytest.importorskip("griffe", reason="needs the extra docs")
    from docs.site import readme

    assert json.loads(readme.published_quick()) == course.published(), "run: make bench-table"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_cards_link_to_the_documentation(language, tmp_path, monkeypatch):
    words, path = LANGUAGES[language], documentation.path_of("encodings/rope.html", language)
    monkeypatch.setattr(documentation, "built_site", lambda: None)
    assert f"<code>out/site/{path} (make docs)</code>" in draw("gallery", words, encoding="rope").html
    monkeypatch.setattr(documentation, "built_site", lambda: tmp_path)
    assert f'<a href="/docs/{path}"' in draw("gallery", words, encoding="rope").html
    monkeypatch.setattr(documentation, "_site", lambda: "https://docs.example.com")
    assert f'<a href="https://docs.example.com/{path}"' in draw("gallery", words, encoding="rope").html


def test_compare_s_code_makes_the_drawn_kernels_and_options_reach_them():
    view = draw("compare", a="t5:buckets=8,max_distance=32", b="t5", c="shaw:max_distance=3", length=40, head=2)
    kernels = run(view.code)["kernels"]
    assert list(kernels) == ["t5 (A)", "t5 (B)", "shaw"]
    drawn = [p for p in view.panels() if isinstance(p, Heat)]
    for panel, kernel in zip(drawn, kernels.values(), strict=True):
        np.testing.assert_allclose(panel.z, kernel[2], atol=1e-9)
    assert not np.allclose(drawn[0].z, drawn[1].z)


def test_compare_draws_the_attention_of_the_last_query():
    """The weights are the softmax of ALiBi's penalty, and the table has the share beyond the training length."""
    view = draw("compare", a="alibi", b="none", c="", length=64, train=32, head=7)
    attention = view.panels()[2]
    r = attention.x
    weights = np.exp(r * posenc.formulas.alibi_slopes(8)[7])
    np.testing.assert_allclose(attention.series["alibi"], weights / weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(attention.series["none"], np.full(64, 1 / 64), rtol=1e-6)
    assert "50.0%" in view.html  # without position, 32 of 64 keys are 32 or more tokens back


def test_compare_draws_a_long_sequence_coarsely_first_and_from_true_positions():
    page = PAGES["compare"]
    state = page.complete({"a": "alibi", "b": "rope", "c": "", "length": "20000"})
    first, second = (page.draw(state, EN, coarse=coarse) for coarse in (True, False))
    assert first.finer and not second.finer
    rough, fine = (view.panels()[3] for view in (first, second))
    assert rough.z.shape[0] <= 64 < fine.z.shape[0] <= 192
    slope = posenc.formulas.alibi_slopes(8)[0]
    np.testing.assert_allclose(fine.z, -slope * np.abs(fine.x[None] - fine.y[:, None]), rtol=1e-6)
    assert not page.draw(page.complete({"length": "512"}), EN, coarse=True).finer


@pytest.mark.parametrize("name", [  # xlnet's tables are as long as transformer_xl's
    pytest.param(name, marks=pytest.mark.slow) if name == "transformer_xl" else name for name in posenc.list_encodings()
])  # fmt: skip
def test_compare_draws_the_same_values_from_cached_tables_as_from_plans(name):
    wanted = analysis.subject(name)
    view = draw("compare", a=name, b="", c="", length=40, head=3)
    positions = analysis.sample_positions(40)
    np.testing.assert_allclose(view.panels()[3].z, analysis.kernel(wanted, positions, positions)[3], atol=1e-9)
    label = EN("untrained table", name=name) if wanted.tables == "untrained" else name
    over, far = (panel.series[label] for panel in view.panels()[:2])
    np.testing.assert_allclose(over, analysis.over_distance(wanted, positions.flip(0).neg(), at=39)[3], atol=1e-9)
    assert (compare._tables(name) is not None) == (name in ("shaw", "clipped", "t5", "deberta"))
    if compare._tables(name) is not None:
        np.testing.assert_allclose(far, analysis.over_distance(wanted, compare.FAR_DISTANCES)[3].flip(0), atol=1e-9)


def test_compare_s_scales_change_the_axes_and_not_the_export():
    page = PAGES["compare"]
    given = {"a": "t5", "b": "alibi", "c": "rope", "length": "200"}
    plain = draw("compare", **given).panels()
    assert plain[0].y_min == compare.LOWEST_SCORE and not plain[0].log_x
    assert draw("compare", **given, scale="full").panels()[0].y_min is None
    logs = draw("compare", **given, scale="log", axis="log").panels()
    assert logs[0].signed_log_y and logs[0].log_x and logs[0].x.min() == 1
    np.testing.assert_allclose(logs[0].series["t5"], plain[0].series["t5"][:-1][::-1])
    own = draw("compare", **given, scale="own").panels()
    for label, y in own[0].series.items():
        largest = max(np.nanmax(np.abs(p.series[label])) for p in plain[:2])
        np.testing.assert_allclose(y * largest, plain[0].series[label], atol=1e-9)
    limits = [p.limits for p in draw("compare", **given, colours="shared").panels()[3:]]
    assert len(set(limits)) == 1 and limits[0][1] == max(p.limits[1] for p in plain[3:])
    raw, changed = (page.export(page.complete({**given, **more}), EN) for more in ({}, {"scale": "own", "axis": "log"}))
    for one, other in zip(raw[:3], changed[:3], strict=True):
        np.testing.assert_array_equal(one.x, other.x)
        np.testing.assert_array_equal(one.series["alibi"], other.series["alibi"])


def test_compare_never_draws_a_straight_line_without_saying_so():
    default = draw("compare")
    assert not default.notes  # the trained table is visible beside alibi
    assert "t5: the table of a small model" in default.html
    assert "t5 (trained), head 0" in default.panels()[3].title
    faint = draw("compare", a="t5:std=0.01", b="alibi", c="")
    assert "t5: untrained" in faint.notes[0] and "draws as a straight line" in faint.notes[1]
    assert "t5 (untrained)" in faint.panels()[0].series and "t5 (untrained)" in faint.panels()[3].title
    assert draw("compare", a="none", b="rope", c="").notes == [EN("curve zero", name="none")]
    assert "image patches" in draw("compare", a="axial", b="", c="").notes[0]


def test_a_sentence_of_any_length_is_drawn_and_word_numbers_clamp():
    for text, number in (("hello", 1), ("猫", 1), ("我爱你", 3), ("a b", 2)):
        for name in posenc.list_encodings():
            view = draw("sentence", text=text, encoding=name, first=7, second=9)
            assert view.figures[2].panels[0].z.shape == (number, number)
    assert draw("sentence", text="猫", encoding="rope").notes[0] == EN("swap one", name="rope")
    notes = draw("sentence", text="我爱你", encoding="rope").notes  # the second number, 5, is past the end
    assert notes[0] == EN("clamped", last=2, first=1, second=2) and "swapping “爱” and “你”" in notes[1]
    for text in ("", "x" * 3000):
        with pytest.raises(url_state.InputError) as error:
            draw("sentence", text=text)
        assert error.value.clear


def test_compare_exports_every_position_and_every_distance():
    page = PAGES["compare"]
    given = {"a": "alibi", "b": "none", "c": ""}
    for length, drawn, kept in ((300, 150, 300), (1000, 167, 167)):
        state = page.complete({**given, "length": str(length)})
        view, panels = page.draw(state, EN), page.export(state, EN)
        assert view.panels()[3].z.shape == (drawn, drawn) and panels[3].z.shape == (kept, kept)
        assert f"show {drawn} of the {length} positions" in view.html
        assert ("CSV holds all of them" in view.html) == (kept == length)
        assert [len(panel.x) for panel in panels[:3]] == [length, len(compare.FAR_DISTANCES), length]
        assert panels[0].series["alibi"][0] == pytest.approx(-(length - 1) * posenc.formulas.alibi_slopes(8)[0])


def test_compare_draws_the_encodings_that_can_be_drawn_and_notes_the_others():
    view = draw("compare", a="learned:max_length=64", b="alibi", c="", length=100)
    assert len(view.notes) == 1 and "max_length=64" in view.notes[0]
    assert list(view.panels()[0].series) == ["alibi"]


@pytest.mark.parametrize("name", [n for n in posenc.list_encodings() if n != "learned"])
def test_plan_memory_is_that_of_the_plan_s_tensors(name):
    subject = analysis.subject(name, **analysis.LAYER_SIZES)
    if subject.absolute:
        return
    plan = subject.plan(posenc.Positions(33))
    tensors = [t for _, t in plan.tensors()]
    if plan.rotate is not None:
        tensors += [*plan.rotate.k, *(plan.rotate.q if plan.rotate.q is not plan.rotate.k else ())]
    assert compare.plan_memory(name, 33) == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", posenc.list_encodings())
def test_the_sentence_s_code_makes_the_drawn_attention(name):
    view = draw("sentence", encoding=name, head=1, causal="true", text="a b c a d", first=0, second=2)
    before = view.figures[2].panels[0]
    np.testing.assert_allclose(before.z, run(view.code)["attention"][1].detach(), atol=1e-6)
    assert np.all(before.z[np.triu_indices(5, 1)] == 0)
    patterns = {p.title.removesuffix("\u00a0*"): p.z for p in view.figures[0].panels}
    np.testing.assert_allclose(patterns[name], before.z)
    total, *terms = (p.z for p in view.figures[1].panels)
    np.testing.assert_allclose(np.sum(terms, axis=0), total, atol=1e-6)


def test_the_note_states_equivariance_to_swaps_and_shifts():
    def note(**given):
        return draw("sentence", text="to be or not to be", first=0, second=3, **given).notes[0]

    assert note(encoding="none") == EN("swap nothing", name="none", one="to", other="not")
    assert "it depends on order" in note(encoding="alibi")
    for relative in ("t5", "rope", "alibi", "shaw", "transformer_xl", "deberta"):
        assert "changes nothing" in note(encoding=relative, change="shift", shift=300), relative
    for absolute in ("sinusoidal", "learned"):
        assert "absolute positions matter" in note(encoding=absolute, change="shift", shift=300), absolute


def test_extend_draws_the_scaling_s_own_wavelengths_and_its_config_reads_back():
    for kind in ("linear", "ntk", "dynamic", "yarn", "llama3", "proportional"):
        view = draw("extend", scaling=kind, target=32768)
        names = run(view.code)
        drawn = list(view.panels()[0].series.values())[-1]
        np.testing.assert_allclose(drawn, names["wavelengths"], rtol=1e-12)
        again = posenc.scaling.from_config(displayed_json(view))
        if kind != "ntk":  # NTK is written as a larger base
            assert again == names["scaling"], kind
    assert "1.1386" in draw("extend", scaling="yarn", target=16384).html


def test_extend_draws_the_phases_outside_the_training_range():
    plain, linear = draw("extend", scaling="linear", target=16384).figures[1].panels
    slow = analysis.wavelengths(128, 10000.0) > 4096
    assert plain.z[slow.numpy()].any(axis=1).all() and not plain.z[~slow.numpy()].any()
    assert not linear.z[:, :-1].any()  # interpolation stays within the range


def test_extend_reads_a_pasted_configuration():
    text = json.dumps(
        {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 8192, "rope_theta": 500000.0}
    )
    assert pasted_config.from_json(text, EN) == (128, 500000.0, 8192, 8192, "none", "", "", "")
    for wrong, words in (("{", "not JSON"), ("[1]", "whole config.json"), ("x" * 200_000, "characters")):
        with pytest.raises(ValueError, match=words):
            pasted_config.from_json(wrong, EN)


def displayed_json(view):
    """The configuration that the page shows."""
    return json.loads(re.search(r"<code>(.*?)</code>", view.html, re.S)[1].replace("&quot;", '"'))


ROPE31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
WHOLE = {"hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 500000.0, "max_position_embeddings": 131072}
PASTED = {
    "Llama 3.1": WHOLE | {"rope_scaling": ROPE31},
    "yarn": WHOLE | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16,
                                      "beta_slow": 2, "truncate": False, "attention_factor": 1.25}},
    "dynamic": WHOLE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "linear": WHOLE | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "plain": WHOLE,
    "part": WHOLE | {"partial_rotary_factor": 0.25},
    "GPT-J": {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "max_position_embeddings": 2048},
    "values": {"model_type": "roformer", "rotary_value": True, "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 512},
    "longrope": WHOLE | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.5] * 64, "factor": 16.0,
                                          "original_max_position_embeddings": 8192, "attention_factor": 1.1}},
    "proportional": WHOLE | {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500000.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", PASTED)
def test_a_pasted_configuration_is_reproduced(name):
    """The JSON to merge has the rotation and the length of the pasted configuration."""
    config = PASTED[name]
    pasted = pasted_config.from_json(json.dumps(config), EN)
    view = draw("extend", **dict(zip(pasted_config.FORM, pasted, strict=True)), config=json.dumps(config))
    assert EN("json same") in view.html and "differs" not in view.html
    again, wanted = displayed_json(view), read(config)
    assert again["max_position_embeddings"] == config["max_position_embeddings"]
    got = read(again)
    assert (got.scaling, got.base or 10000.0, got.head_dim, got.rotary_dim) == (
        wanted.scaling, wanted.base or 10000.0, wanted.head_dim, wanted.rotary_dim
    )  # fmt: skip
    assert (got.layout, got.values) == (wanted.layout, wanted.values)
    names = run(view.code)
    np.testing.assert_allclose(list(view.panels()[0].series.values())[-1], names["wavelengths"], rtol=1e-12)
    assert names["rope"].scaling == wanted.scaling


@pytest.fixture
def handlers(built):
    """(the server-side handlers by name, the page's controls)."""
    controls = built["en"]["extend"].controls
    return {function.__name__: function for _, function, *_ in controls.handlers}, controls


def test_a_configuration_without_rotation_clears_the_form_and_the_figures(handlers):
    found, controls = handlers
    paste = found["paste"]
    model, *values, message = paste(json.dumps(PASTED["Llama 3.1"]))
    assert model == ""  # another model than Llama 3, which it extends
    assert paste(json.dumps(WHOLE | {"max_position_embeddings": 8192}))[0] == "Llama 3 8B"
    assert values == [128, 500000.0, 8192, 131072, "llama3", "factor=8.0", "", ""] and "alert" not in message
    assert "500000" in message and "131072" in message and "factor=8.0" in message
    for config, words in (({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12}, "no rotation"),
                          (WHOLE | {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
                          (WHOLE | {"rope_scaling": {"type": "linear", "factr": 2}}, "did you mean")):  # fmt: skip
        model, *values, message = paste(json.dumps(config))
        assert values == [None, None, None, None, "none", "", "", ""] and "alert" in message and words in message
        values += [json.dumps(config), model]
        response = views.render_values(PAGES["extend"], controls, EN, values, width=1000, coarse=True)
        assert response["cleared"] and "plots" not in response
        assert words in response["status"]  # the reason stands where the figures were
    _, *values, message = paste(json.dumps({"rope_type": "linear", "factor": 2.0}))
    assert values[:4] == [None, 10000.0, None, None] and "no head size" in message and "no trained length" in message


def test_the_user_s_changes_replace_what_was_pasted(handlers):
    found, _ = handlers
    assert found["retarget"]("factor=8.0,low=1.0,rotary_dim=64") == "low=1.0,rotary_dim=64"
    assert found["rescale"]("factor=8.0,low=1.0,rotary_dim=64") == "rotary_dim=64"
    view = draw("extend", base=500000.0, original=8192, target=65536, scaling="llama3", options="high=5.0")
    rope = displayed_json(view)["rope_parameters"]
    assert (rope["factor"], rope["high_freq_factor"]) == (8.0, 5.0)
    for wrong in (
        "magic=1",
        "factor",
        "factor=x",
        "layout=3",
        "values=3",
        "rotary_dim=7",
        "rotary_dim=4096",
        "factor=-1",
    ):
        with pytest.raises(ValueError):
            draw("extend", options=wrong)


def test_every_model_names_the_published_file_of_its_settings():
    configs = json.loads((Path(pages.__file__).parent / "models.json").read_text(encoding="utf-8"))
    assert list(configs) == list(extend.MODELS)
    for name, config in configs.items():
        assert re.match(r"[\w.-]+/[\w.-]+, [\w/.]+\.py, ", config["source"]) and "/" in config["model"], name
        pasted = pasted_config.from_json(json.dumps({k: v for k, v in config.items() if not k.endswith("_factor")}), EN)
        model = extend.MODELS[name]
        assert (pasted.head_dim, pasted.base) == (model.head_dim, model.base)
        assert model.target > model.original and len(model.long) == len(model.short) in (0, model.head_dim // 2)


def test_phi_3_5_has_its_published_factors():
    model = extend.MODELS["Phi-3.5 mini"]
    given = {"head_dim": 96, "base": model.base, "original": 4096, "scaling": "longrope"}
    long, short = (", ".join(map(str, factors)) for factors in (model.long, model.short))
    view = draw("extend", **given, target=model.target, factors=long, short=short)
    plain, stretched = view.panels()[0].series.values()
    np.testing.assert_allclose(stretched / plain, model.long, rtol=1e-6)
    assert "1.1902" in view.html  # sqrt(1 + ln 32 / ln 4096)
    # the configuration to paste is the published one, and reads back into the same fields
    config = displayed_json(view)
    rope = config.get("rope_parameters") or config["rope_scaling"]
    assert (tuple(rope["long_factor"]), tuple(rope["short_factor"])) == (model.long, model.short)
    again = pasted_config.from_json(json.dumps(config | {"head_dim": 96}), EN)
    assert again == (96, model.base, 4096, 131072, "longrope", "factor=32.0", long, short)
    assert run(view.code)["scaling"] == posenc.scaling.LongRoPE(
        short=model.short, long=model.long, original=4096, factor=32.0
    )
    inside = draw("extend", **given, target=4096, factors=long, short=short).panels()[0].series.values()
    np.testing.assert_allclose(np.divide(*reversed(list(inside))), model.short, rtol=1e-6)


def test_results_open_a_run_and_name_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no run here yet"):
        draw("results")
    with pytest.raises(ValueError, match="not a run"):
        draw("results", run=tmp_path)
    folder = tmp_path / "out" / "first"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<h1>hello</h1>")
    assert results.runs() == ["out/first"]
    view = draw("results", run="out/first")
    assert "<iframe" in view.html and "sandbox" in view.html
    (folder / "results.json").write_text("not json")
    assert "cannot be read" in draw("results", run="out/first").notes[0]


# ---- bad input ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key, given, words",
    [
        ("gallery", {"encoding": "t6"}, "unknown"),
        ("compare", {"a": "", "b": "", "c": ""}, "at least one"),
        ("compare", {"a": "t5:buckets=7", "b": "", "c": ""}, "buckets"),
        ("compare", {"a": "t5:shoes=7", "b": "", "c": ""}, "no option 'shoes'"),
        ("compare", {"a": "t5:buckets=many", "b": "", "c": ""}, "buckets"),
        ("compare", {"length": "-3"}, "whole number from 2"),
        ("compare", {"length": "1e9"}, "whole number"),
        ("compare", {"length": "nan"}, "whole number"),
        ("compare", {"length": "long"}, "not a number"),
        ("sentence", {"text": ""}, "no tokens"),
        ("sentence", {"text": " \n\t​"}, "no tokens"),
        ("sentence", {"text": "x" * 1_000_000}, "1,000,000 characters"),
        ("sentence", {"first": "x"}, "not a number"),
        ("sentence", {"strength": "9"}, "between 0 and 2"),
        ("extend", {"head_dim": "7"}, "even"),
        ("extend", {"base": "-1"}, "between"),
        ("extend", {"scaling": "magic"}, "unknown"),
        ("extend", {"scaling": "longrope"}, "give 64 numbers"),
        ("extend", {"scaling": "longrope", "factors": "a, b"}, "must be numbers"),
        ("extend", {"scaling": "longrope", "factors": "1, " * 64, "short": "1, 2"}, "give 64 numbers.*got 2"),
        ("learn", {"chapter": "13"}, "whole number from 1 to 12"),
        ("learn", {"chapter": "8", "number": "x"}, "not a number"),
        ("learn", {"chapter": "8", "number": "99"}, "between 1 and 7"),
        ("results", {"run": "/etc"}, "not a run"),
        ("results", {"run": "\0"}, "not a run"),
    ],
)
def test_invalid_input_gets_a_sentence(key, given, words):
    with pytest.raises(ValueError, match=words):
        draw(key, **given)


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("the cat's mat.", ["the", "cat", "'", "s", "mat", "."]),
        ("我爱你", ["我", "爱", "你"]),
        ("GPT-4写作", ["GPT", "-", "4", "写", "作"]),
        ("مرحبا بالعالم", ["مرحبا", "بالعالم"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("hi 👩‍👩‍👧!", ["hi", "👩‍👩‍👧!"]),
        ("é vs é", ["é", "vs", "é"]),
    ],
)
def test_any_script_is_split_into_tokens(text, tokens):
    assert sentence.split(text) == tokens
    view = draw("sentence", text=text, first=0, second=1)
    json.loads(as_json(subplots(view.figures[2].panels)))


def test_unusual_text_is_drawn_and_escaped():
    view = draw("sentence", text='<img src=x onerror="alert(1)"> & \ud800 ‮evil', first=0, second=1)
    assert "<img" not in view.html
    assert "<img" not in as_json(subplots(view.figures[2].panels))


# ---- links, languages, options -----------------------------------------------------------------------------------
def test_a_link_restores_its_state():
    page = PAGES["compare"]
    wanted = page.complete({"a": "t5:buckets=16,causal=true", "b": "rope:base=500000.0", "c": "", "length": "96"})
    query = url_state.make_link("compare", wanted, page.defaults)
    assert query.startswith("?view=compare&a=t5:buckets=16,causal=true&")
    assert page.complete(url_state.parse_query(query, EN)) == wanted
    odd = {"text": "a&b=c #d 你好 \"'<>", "encoding": "t5"}
    assert url_state.parse_query(url_state.make_link("sentence", odd), EN) == {"view": "sentence", **odd}
    with pytest.raises(ValueError, match="characters long"):
        url_state.parse_query("?text=" + "x" * 30_000, EN)


@pytest.mark.parametrize("name", posenc.list_encodings())
def test_controls_follow_the_options_and_give_them_back(name):
    pool, settings = compare._pool_options(name), compare._pool_settings(name)
    found = [option for option in pool if option is not None]
    assert found == [o for kind in ("slider", "switch", "choice") for o in options_of(name) if o.kind == kind]
    values = [each.get("value", False) for each in settings]
    slot = object.__new__(compare._Slot)
    assert slot.read((name, *values)) == name
    for number, option in enumerate(pool):
        if option is not None and option.kind == "slider":
            changed = list(values)
            changed[number] = option.high
            word = slot.read((name, *changed))
            assert spec.parse(word) == (
                name,
                {option.name: option.value(option.high)} if option.high != option.default else {},
            )


def test_both_languages_have_every_text():
    assert set(CHINESE.table) >= set(ENGLISH.table)
    for key, (english, chinese) in BOTH.items():
        fields = [set(re.findall(r"{(\w+)", text)) for text in (english, chinese)]
        assert english and chinese and fields[0] == fields[1], key
    for key, english in ENGLISH.table.items():
        assert set(re.findall(r"{(\w+)", english)) == set(re.findall(r"{(\w+)", CHINESE.table[key])), key


def test_every_text_that_the_code_uses_is_in_the_tables():
    used = set()
    for path in [*SOURCE.rglob("*.py"), *(SOURCE.parent / "plot").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "words":
                used |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    missing = {key for key in used if key not in EN.table or key not in ZH.table}
    assert len(used) > 60 and not missing


@pytest.mark.parametrize("name", posenc.list_encodings())
def test_every_encoding_is_described_in_both_languages(name):
    for language in ("en", "zh"):
        assert all(descriptions.describe(name, language))


def test_pages_in_chinese_have_chinese_titles():
    for key in ("gallery", "learn", "compare", "sentence", "extend"):
        titles = [p.title + p.x_label + p.y_label for p in draw(key, ZH).panels()]
        assert all(re.search(r"[\u4e00-\u9fff]", title) for title in titles), titles


# ---- figures -----------------------------------------------------------------------------------------------------
def unpack(packed):
    values = np.frombuffer(base64.b64decode(packed["bdata"]), dtype=np.float32)
    return values.reshape([int(n) for n in packed["shape"].split(",")]) if "shape" in packed else values


def test_plotly_figures_have_the_panels_values_titles_and_axes():
    lines = Lines(
        "see < this", np.arange(3), {"one": np.array([1.0, np.inf, 3.0]), "two": np.zeros(3)}, "x", "y", log_x=True
    )
    heat = Heat("that", np.arange(2), np.arange(3), np.arange(6.0).reshape(3, 2), "j", "i", "unit")
    figure = json.loads(as_json(subplots([lines, heat])))
    one, two, picture = figure["data"]
    np.testing.assert_array_equal(unpack(one["y"]), np.array([1.0, np.nan, 3.0], dtype=np.float32))
    np.testing.assert_array_equal(unpack(picture["z"]), heat.z)
    assert [a["text"] for a in figure["layout"]["annotations"]] == ["see &lt; this", "that"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "x" and figure["layout"]["xaxis"]["type"] == "log"
    assert figure["layout"]["yaxis2"]["title"]["text"] == "i" and figure["layout"]["yaxis2"]["autorange"] == "reversed"
    assert one["line"]["color"] != two["line"]["color"] and one["line"]["dash"] != two["line"]["dash"]


def test_legends_are_above_their_panel_and_labels_of_marks_apart():
    names = [f"encoding number {n}" for n in range(5)]
    x, series = np.array([16.0, 4096.0]), {name: np.ones(2) for name in names}
    lines = Lines("title", x, series, "x", "y", log_x=True, log_y=True, horizontal_marks={"a": 4096.0, "b": 4096.0})
    layout = json.loads(as_json(subplots([lines], columns=1, width=400)))["layout"]
    legends = [value for key, value in layout.items() if key.startswith("legend")]
    top = layout["yaxis"]["domain"][1]
    assert len(legends) == 5 and all(legend["y"] >= top for legend in legends)  # one line for each long name
    assert sorted(round((legend["y"] - top) * layout["height"]) for legend in legends) == [0, 22, 44, 66, 88]
    title, *marks = layout["annotations"]
    assert title["y"] > max(legend["y"] for legend in legends)
    assert [mark["xanchor"] for mark in marks] == ["left", "right"]
    shared = json.loads(as_json(subplots([lines, lines], columns=2, width=2000)))["layout"]
    assert sum(key.startswith("legend") for key in shared) == 1  # one for both


def test_a_mosaic_has_every_panel_in_its_tile():
    panels = [
        Heat(f"p{n}", np.arange(3), np.arange(3), np.full((3, 3), float(n)), "j", "i", "unit", (0.0, 4.0))
        for n in range(5)
    ]
    figure = json.loads(as_json(mosaic(panels, columns=2)))
    (trace,) = figure["data"]
    z = unpack(trace["z"])
    assert z.shape == (12, 7) and np.nansum(z) == 9 * (1 + 2 + 3 + 4)
    assert np.all(z[5:8, 4:7] == 3) and np.isnan(z[9:12, 4:7]).all()
    assert [a["text"] for a in figure["layout"]["annotations"]] == ["p0", "p1", "p2", "p3", "p4"]


def test_drawing_keeps_the_random_state():
    before = torch.get_rng_state()
    for key in ("gallery", "learn", "compare", "sentence"):
        draw(key)
    for number in range(1, len(CHAPTERS) + 1):
        draw("learn", chapter=number)
    assert torch.equal(torch.get_rng_state(), before)


def test_results_draw_a_run_of_the_lab(tiny_run):
    view = draw("results", run=tiny_run)
    (panel,) = view.panels()
    assert list(panel.x) == [16, 32] and panel.vertical_marks == {"trained on 16 tokens": 16.0}
    np.testing.assert_allclose(panel.series["alibi"], [0.45, 0.45])
    np.testing.assert_allclose(panel.series["rope"], [0.25, 0.25])
    assert "report.html" in view.notes[0]
