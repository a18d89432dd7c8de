"""Neighbour: the answer at each symbol is the one `distance` positions after it. Bidirectional: an encoder's task."""

from __future__ import annotations

import torch

from . import BOS, FIRST, IGNORE, Batch, Task, symbols


class Neighbour(Task):
    summary = "name the symbol some positions later (encoder)"
    causal = False

    def __init__(self, distance: int = 1, symbols: int = 8):
        if distance < 1:
            raise ValueError(f"distance={distance} must be at least 1")
        self.distance, self.symbols = distance, symbols
        self.vocabulary = FIRST + symbols

    def batch(self, size, count, generator):
        row = symbols(count, size + self.distance, self.symbols, generator)
        bos = torch.full((count, 1), BOS)
        inputs = torch.cat((bos, row), dim=1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, 1 : 1 + size] = row[:, self.distance :]
        return Batch(inputs, targets)
