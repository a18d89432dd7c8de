"""Parity: is the number of ones odd? The negative control: no fixed-depth model learns it at every length."""

from __future__ import annotations

from . import FIRST, Task, question_and_answer, symbols


class Parity(Task):
    summary = "is the number of ones odd? (negative control)"

    def __init__(self):
        self.vocabulary = FIRST + 2

    def batch(self, size, count, generator):
        bits = symbols(count, size, 2, generator)
        return question_and_answer(bits, FIRST + (bits - FIRST).sum(dim=1, keepdim=True) % 2)
