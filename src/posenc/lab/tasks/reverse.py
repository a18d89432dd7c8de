"""Reverse: a b c → c b a."""

from __future__ import annotations

from . import FIRST, Task, question_and_answer, symbols


class Reverse(Task):
    summary = "write the sequence backwards"

    def __init__(self, symbols: int = 16, unique: bool = False):
        self.symbols, self.unique = symbols, unique
        self.vocabulary = FIRST + symbols

    def batch(self, size, count, generator):
        row = symbols(count, size, self.symbols, generator, unique=self.unique)
        return question_and_answer(row, row.flip(1))
