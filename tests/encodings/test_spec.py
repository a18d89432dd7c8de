import pytest

from posenc import OptionError
from posenc.encodings import spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t5", ("t5", {})),
        ("rope:base=500000", ("rope", {"base": 500000})),
        ("t5:buckets=64,causal=true,scale=None", ("t5", {"buckets": 64, "causal": True, "scale": None})),
        ("grid_bias:window=(8, 4),class_token=true", ("grid_bias", {"window": (8, 4), "class_token": True})),
        ("many_axes:axis_of=(0,1,0),text=true", ("many_axes", {"axis_of": (0, 1, 0), "text": True})),
        ("sinusoidal:layout=tensor2tensor, base=1e3", ("sinusoidal", {"layout": "tensor2tensor", "base": 1000.0})),
    ],
)
def test_a_specification_is_a_name_and_options(text, expected):
    assert spec.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["t5:", "t5:buckets", "t5:buckets=", "t5:=3", "t5:a b=3", "t5:causal=true,", "t5:(a=3,b=4)"]
)
def test_a_malformed_option_is_refused(text):
    with pytest.raises(OptionError, match="OPTION=VALUE"):
        spec.parse(text)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'alibi'"):
        spec.parse("alibbi:heads=2")


def test_values_never_run_code():
    assert spec.value("__import__('os').getcwd()") == "__import__('os').getcwd()"


def test_names_of_other_things_and_a_bare_value():
    assert spec.parse_options("copy:unique=true") == ("copy", {"unique": True})
    assert spec.parse_options("yarn:8,beta_fast=4", bare="factor") == ("yarn", {"factor": 8, "beta_fast": 4})
    for text in ("yarn:8", "yarn:8,9", "yarn:,"):
        with pytest.raises(OptionError, match="OPTION=VALUE"):
            spec.parse_options(text, bare=None if text == "yarn:8" else "factor")


def test_an_extension_is_split_off():
    assert spec.split_extension("rope") == ("rope", None)
    assert spec.split_extension(" rope:base=1e6+yarn:8,beta_fast=4 ") == ("rope:base=1e6", "yarn:8,beta_fast=4")
    with pytest.raises(OptionError, match="no extension after"):
        spec.split_extension("rope+")


def test_a_value_has_at_most_200_characters():
    assert spec.value("x" * 200) == "x" * 200
    with pytest.raises(OptionError, match="at most 200"):
        spec.value("x" * 201)


@pytest.mark.parametrize("text", ["t5:buckets=32,buckets=16", "rope: base=3 ,base=4"])
def test_an_option_that_is_given_twice_is_refused(text):
    with pytest.raises(OptionError, match="is given twice in .*; keep one"):
        spec.parse(text)


@pytest.mark.parametrize(
    "extension, error",
    [
        ("yarn:8,foo=1", "yarn has no option foo; its options are factor, original"),
        ("linear", "linear needs factor; for example rope\\+linear:8"),
        ("linear:8,factor=4", "factor is given twice"),
    ],
)
def test_an_extension_names_what_it_takes(extension, error):
    with pytest.raises(OptionError, match=error):
        spec.make_extension("rope", f"rope+{extension}", extension, 4096)
