"""Copy: a b c → a b c."""

from __future__ import annotations

from . import FIRST, Task, question_and_answer, symbols


class Copy(Task):
    """Unique symbols can be found by their content; repeated symbols only by their position."""

    summary = "write the sequence again"

    def __init__(self, symbols: int | None = None, unique: bool = False):
        self.unique = unique
        self.symbols = (256 if unique else 16) if symbols is None else symbols
        self.vocabulary = FIRST + self.symbols

    def batch(self, size, count, generator):
        row = symbols(count, size, self.symbols, generator, unique=self.unique)
        return question_and_answer(row, row)
