"""Addition with the lowest digit first: 57 + 48 is 7 5 + 8 4 → 5 0 1."""

from __future__ import annotations

import torch

from . import FIRST, Task, question_and_answer


class Addition(Task):
    """n digits a number, n + 1 digits of sum. With reversed digits a carry moves in the order of writing."""

    summary = "add two numbers, lowest digit first"

    def __init__(self):
        self.vocabulary = FIRST + 11  # ten digits and the plus sign

    def batch(self, size, count, generator):
        a, b = torch.randint(10, (2, count, size), generator=generator)
        digits, carry = [], torch.zeros(count, dtype=torch.int64)
        for digit in range(size):
            total = a[:, digit] + b[:, digit] + carry
            digits.append(total % 10)
            carry = total // 10
        answer = torch.stack((*digits, carry), dim=1)
        plus = torch.full((count, 1), 10)
        return question_and_answer(FIRST + torch.cat((a, plus, b), dim=1), FIRST + answer)
