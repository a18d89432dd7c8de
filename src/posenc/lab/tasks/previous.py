"""Previous token: a b b a → - a b b. One layer suffices if it can attend one position back; symbols repeat."""

from __future__ import annotations

import torch

from . import BOS, FIRST, IGNORE, Batch, Task, symbols


class Previous(Task):
    """Use one layer: a single layer without positions cannot tell which of the repeated symbols came last."""

    summary = "name the symbol just before"

    def __init__(self, symbols: int = 8):
        self.symbols = symbols
        self.vocabulary = FIRST + symbols

    def batch(self, size, count, generator):
        row = symbols(count, size + 1, self.symbols, generator)
        bos = torch.full((count, 1), BOS)
        nothing = torch.full((count, 2), IGNORE)
        return Batch(torch.cat((bos, row), dim=1), torch.cat((nothing, row[:, :-1]), dim=1))
