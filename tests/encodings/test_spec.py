import pytest

from posenc import OptionError
from posenc.encodings import spec


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("t5", ("t5", {})),
        ("rope:base=500000", ("rope", {"base": 500000})),
        ("t5:buckets=64,causal=true,scale=None", ("t5", {"buckets": 64, "causal": True, "scale": None})),
        ("sinusoidal:layout=tensor2tensor, base=1e3", ("sinusoidal", {"layout": "tensor2tensor", "base": 1000.0})),
    ],
)
def test_a_word_is_a_name_and_options(word, expected):
    assert spec.parse(word) == expected


@pytest.mark.parametrize("word", ["t5:", "t5:buckets", "t5:buckets=", "t5:=3", "t5:a b=3", "t5:causal=true,"])
def test_what_is_not_an_option_is_said(word):
    with pytest.raises(OptionError, match="OPTION=VALUE"):
        spec.parse(word)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'alibi'"):
        spec.parse("alibbi:heads=2")


def test_values_never_run_code():
    assert spec.value("__import__('os').getcwd()") == "__import__('os').getcwd()"
