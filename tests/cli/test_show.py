"""`posenc show` parses the source of a class; the result equals that of importing it."""

import inspect
import re

import pytest

import posenc
from posenc.cli import show
from posenc.core import documentation
from posenc.encodings.registry import ENCODINGS


@pytest.mark.parametrize("name", ENCODINGS)
def test_options_and_docstring_are_those_of_the_class(name):
    source = show.read_source(ENCODINGS[name])
    cls = ENCODINGS[name].load()
    parameters = list(inspect.signature(cls).parameters.values())
    assert [o.name for o in source.options] == [p.name for p in parameters]
    for option, parameter in zip(source.options, parameters):
        assert (option.default is None) == (parameter.default is parameter.empty)
        if option.name in source.defaults:
            assert source.defaults[option.name] == parameter.default
    assert source.doc == inspect.getdoc(cls)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_page_has_the_formula_and_every_option(name):
    text = "\n".join(show.page(ENCODINGS[name], {}))
    assert ENCODINGS[name].formula in text
    for option in show.read_source(ENCODINGS[name]).options:
        assert option.name in text


def test_a_page_links_to_the_documentation(monkeypatch):
    assert any("out/site/encodings/t5.html (make docs)" in line for line in show.page(ENCODINGS["t5"], {}))
    monkeypatch.setattr(documentation, "_site", lambda: "https://docs.example.com")
    assert any("https://docs.example.com/encodings/t5.html" in line for line in show.page(ENCODINGS["t5"], {}))
    assert documentation.page_of("t5", "zh") == "https://docs.example.com/zh/encodings/t5.html"


def test_the_choices_of_an_option_are_spelled_out():
    kinds = {option.name: option.annotation for option in show.read_source(ENCODINGS["rope"]).options}
    assert kinds["layout"] == "Literal['half', 'interleaved']"


def test_an_extension_is_shown_as_compare_takes_it(capsys):
    assert show.show_command(["RoPE:head_dim=128+YaRN:8,original=2048"]) == 0
    text = capsys.readouterr().out
    for part in (
        "rope  posenc.RoPE",
        "posenc.scaling.YaRN(factor=8",
        "arXiv:2309.00071",
        "128 dimensions",
        "at 16384 tokens",
    ):
        assert part in text or part in " ".join(text.split())  # a line ends where the terminal does
    assert show.show_command(["rope+linear:4"]) == 0
    text = capsys.readouterr().out
    plain, scaled = re.search(r"longest wavelength: (\S+) tokens, with the extension\s(\S+);", text).groups()
    assert float(scaled) == pytest.approx(4 * float(plain), rel=1e-4)


@pytest.mark.parametrize("name", ["T5", "ALiBi", "ALIBI", "TransformerXL", "transformer-xl", "RoPE", "t5"])
def test_class_names_and_any_case_are_accepted(name, capsys):
    assert show.show_command([name]) == 0
    assert "extrapolates" in capsys.readouterr().out


def test_options_change_the_picture():
    plain, wide = (show.page(ENCODINGS["t5"], given) for given in ({}, {"buckets": 64, "max_distance": 512}))
    assert plain != wide
    assert any("max_distance=512" in line for line in wide)


def test_an_unknown_option_is_refused():
    with pytest.raises(posenc.OptionError, match="t5 has no option bucket; its options are heads"):
        show.page(ENCODINGS["t5"], {"bucket": 3})


def test_an_invalid_option_is_explained():
    with pytest.raises(posenc.OptionError, match="max_distance=4 must exceed"):
        show.page(ENCODINGS["t5"], {"max_distance": 4})


@pytest.mark.parametrize("given", [{"std": 1.0}, {"buckets": 64, "heads": 4}])
def test_an_option_without_effect_is_refused(given):
    with pytest.raises(posenc.OptionError, match="does not change the picture of t5; it depends on buckets, causal"):
        show.page(ENCODINGS["t5"], given)


@pytest.mark.parametrize("given", [{"buckets": 10**9}, {"buckets": 0}, {"buckets": 2.5}, {"buckets": True}])
def test_options_too_large_to_draw_are_refused(given):
    with pytest.raises(posenc.OptionError, match="must be a whole number from 1 to 1024"):
        show.page(ENCODINGS["t5"], given)


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_is_shown_by_its_name_or_class_name_in_any_case(name, capsys):
    pages = set()
    for spelling in (name, name.upper(), ENCODINGS[name].class_name, ENCODINGS[name].class_name.lower()):
        assert show.show_command([spelling]) == 0
        pages.add(capsys.readouterr().out)
    assert len(pages) == 1


def test_a_class_name_takes_options(capsys):
    assert show.show_command(["T5:buckets=64"]) == 0
    assert "buckets=64" in capsys.readouterr().out


@pytest.mark.parametrize("text, error", [
    ("t5:causal=maybe", "causal='maybe' must be True or False"),
    ("sinusoidal:layout=halves", "layout='halves' is unknown"),
    ("shaw:outside=edge", "outside='edge' is unknown"),
    ("rope:head_dim=4,rotary_dim=6", "rotary_dim=6 exceeds head_dim=4"),
    ("many_axes:axis_of=0", "axis_of=0 must name the axis of each pair"),
    ("many_axes:axis_of=(0,-1)", "an axis=-1 must be at least 0"),
    ("fox:start=-1000", "with start=-1000 its numbers leave the range of floating point"),
    ("rope:base=1e308+linear:1e90", "with base=1e\\+308 its numbers leave the range of floating point"),
    ("tempered:alpha=1e308", "with alpha=1e\\+308 its numbers leave the range of floating point"),
    ("none:x=1", "none has no option x; it has no options"),
    ("latent:kv_rank=0", "cannot draw latent: kv_rank=0 must be a whole number"),
])  # fmt: skip
def test_values_that_the_encoding_refuses_are_refused(text, error):
    with pytest.raises(posenc.OptionError, match=error):
        show.show_command([text])


def test_options_of_attention_of_its_own_change_its_picture(capsys):
    pages = []
    for text in ("latent", "LatentAttention:kv_rank=64"):
        assert show.show_command([text]) == 0
        pages.append(capsys.readouterr().out)
    assert "latent and r     █" in pages[0] and pages[0] != pages[1]


def test_both_sides_of_a_clipped_table_are_drawn():
    assert any("[-16, 0]" in line for line in show.page(ENCODINGS["clipped"], {"right": 0}))
