"""Tables, charts and wrapped text for terminals of any width."""

import re

import pytest

from posenc.cli import terminal

BRAILLE = re.compile("[\u2801-\u28ff]")


@pytest.fixture
def columns(monkeypatch):
    def use(n):
        monkeypatch.setattr(terminal, "width", lambda: n)

    return use


@pytest.mark.parametrize("wide", [30, 40, 60, 80, 120, 300])
def test_a_table_fits_its_terminal_and_loses_no_word(columns, wide):
    columns(wide)
    rows = [("a", "some words that are long enough to wrap", "x"), ("bbb", "few", "more words here, and more again")]
    lines = terminal.table(("name", "first", "second"), rows)
    assert all(len(line) <= wide for line in lines)
    printed = re.sub(r"\W+", " ", " ".join(lines)).split()
    for word in re.sub(r"\W+", " ", " ".join(cell for row in rows for cell in row)).split():
        assert word in printed


def test_a_chart_puts_the_highest_value_on_top_and_the_lowest_below(columns):
    columns(60)
    lines = terminal.chart({"": [0.0, 1.0]}, ("0", "", "1"), rows=5)
    assert lines[0].startswith("   1 │")
    assert lines[4].startswith("   0 │")
    first, last = BRAILLE.search(lines[4]), list(BRAILLE.finditer(lines[0]))[-1]
    assert first.start() < 10
    assert last.start() > 40
    assert lines[6].split() == ["0", "1"]


def test_a_chart_draws_nothing_outside_its_limits(columns):
    columns(60)
    lines = terminal.chart({"": [0.0] * 10 + [-99.0] * 10}, ("", "", ""), low=-1.0, high=1.0)
    rightmost = max(match.start() for line in lines for match in BRAILLE.finditer(line))
    assert rightmost < len(lines[-2]) * 0.6


def test_a_flat_curve_has_a_range_to_be_drawn_in(columns):
    columns(60)
    assert any(BRAILLE.search(line) for line in terminal.chart({"": [3, 3, 3]}, ("", "", "")))


def test_curves_are_named_at_their_ends_and_names_do_not_overlap(columns):
    columns(80)
    lines = terminal.chart({"one": [0.0, 1.0], "two": [0.0, 0.99], "low": [0.0, 0.0]}, ("", "", ""))
    ends = [line.split()[-1] for line in lines[:-1]]
    assert ends.index("one") < ends.index("two") < ends.index("low")


def test_steps_of_whole_numbers_are_not_sloped(columns):
    columns(60)
    lines = terminal.chart({"": [0] * 50 + [9] * 50}, ("", "", ""), rows=8)
    assert all(len(BRAILLE.findall(line)) <= 1 for line in lines[1:7])


def test_a_heat_map_goes_from_blank_to_full():
    assert terminal.heat_map([[-1, 0, 1, 5]], low=-1, high=1) == [" ▒██"]


def test_hanging_text_stays_under_its_label(columns):
    columns(30)
    lines = terminal.hanging("label  ", "words that need more than one line")
    assert lines[0].startswith("label  words")
    assert all(line.startswith(" " * 7) for line in lines[1:])
    assert all(len(line) <= 30 for line in lines)
