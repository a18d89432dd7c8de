"""Checks of values from files and users: what passes, and the sentences of what does not."""

import pytest

import posenc
from posenc.core.checks import flag, keys, listed, maybe, number, one_of, record, show_value, text, whole
from posenc.lab.validate import pair, real

NAME = text(5)


def test_what_is_allowed_passes():
    assert record({"a": whole(0, 5)})("", {"a": 3, "later": object()}) == {"a": 3}
    assert whole(1, 5000, rounded=True)("n", 4096.0) == 4096 and maybe(NAME)("n", None) is None
    assert listed(number(0.0))("n", (1, 2.5)) == [1, 2.5] and pair(NAME, real())("n", ["a", 1]) == ["a", 1.0]
    assert one_of("a", "b")("n", "b") == "b" and flag("n", True) and keys("n", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("check", "wrong", "sentence"),
    [
        (whole(0, 5), True, "it=True must be a whole number from 0 to 5"), (number(0), float("nan"), "it=nan must be a number from 0"),
        (listed(NAME, least=1), [], "a list of 1 to 1000 values, has 0"), (record({"a": NAME}), {}, "it has no a"),
        (listed(whole(0, 5)), [1, 9], r"it\[1\]=9 must be"), (pair(NAME, NAME), "ab", "a list of 2 to 2 values"),
        (record({"a": record({"b": flag})}), {"a": {"b": 1}}, "it.a.b=1 must be true or false"), (NAME, "\ud800", "text of at most 5"),
        (keys, {1: 2}, "it has the key 1"), (one_of("a", "b"), "c", "it='c' must be a or b"),
    ],
)  # fmt: skip
def test_what_is_not_gets_a_sentence(check, wrong, sentence):
    with pytest.raises(posenc.OptionError, match=sentence):
        check("it", wrong)


def test_values_are_named_briefly():
    assert show_value(10**100) == "a whole number of 333 bits" and len(show_value(["x" * 500] * 500)) < 250
