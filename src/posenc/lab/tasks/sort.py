"""Sort: c a b a → a a b c."""

from __future__ import annotations

from . import FIRST, Task, question_and_answer, symbols


class Sort(Task):
    summary = "write the symbols in order"

    def __init__(self, symbols: int = 32):
        self.symbols = symbols
        self.vocabulary = FIRST + symbols

    def batch(self, size, count, generator):
        row = symbols(count, size, self.symbols, generator)
        return question_and_answer(row, row.sort(dim=1).values)
