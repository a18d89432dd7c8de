"""Titles in lines: typography of both languages."""

import itertools

import pytest

from posenc.plot.text_layout import NOT_FIRST, NOT_LAST, WORDS, columns_of, wrap
from posenc.plot.translations import CHINESE, ENGLISH


@pytest.mark.parametrize("most", [14, 20, 27, 40])
@pytest.mark.parametrize("words", [ENGLISH, CHINESE])
def test_lines_fit_and_break_where_they_may(words, most):
    for text in words.table.values():
        lines = wrap(text, most).split("<br>")
        plain = "".join(lines).replace("\u00a0", "").replace(" ", "").replace("&lt;", "<")
        assert plain == text.replace(" ", "")  # nothing is lost
        for line, following in itertools.pairwise(lines):
            assert line and following and following[0] not in NOT_FIRST and line[-1] not in NOT_LAST
            assert columns_of(line) <= most or " " not in line
            joined, at = line + following, len(line)
            assert not any(found.start() < at < found.end() for found in WORDS.finditer(joined)), lines
        assert "j<br>" not in wrap(text, most) or "j<br>−" not in wrap(text, most)


def test_lines_are_even_and_no_more_than_needed():
    assert wrap("one two three four", 100) == "one two three four"
    assert wrap("t5, head 0: constant along each diagonal, so only j − i matters", 50).split("<br>") == [
        "t5, head 0: constant along each", "diagonal, so only j\u00a0−\u00a0i matters",
    ]  # fmt: skip
    assert wrap("a<b & c", 20) == "a&lt;b &amp; c"
    assert wrap("", 5) == ""
