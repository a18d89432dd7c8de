"""Flip-flop (Liu et al. 2023, arXiv:2306.00946): remember the last bit that was written.

w 1  i 0  i 1  r 1  w 0  i 1  r 0        w writes, i is noise, r reads the last written bit
"""

from __future__ import annotations

import torch

from . import BOS, FIRST, IGNORE, Batch, Task

WRITE, IGNORED, READ = FIRST + 2, FIRST + 3, FIRST + 4  # FIRST and FIRST + 1 are the bits


class FlipFlop(Task):
    summary = "remember the last written bit through noise"
    least = 2

    def __init__(self, noise: float = 0.8):
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise={noise} must be between 0 and 1")
        self.noise = noise
        self.vocabulary = FIRST + 5

    def batch(self, size, count, generator):
        draw = torch.rand(count, size, generator=generator)
        order = torch.where(draw < self.noise, IGNORED, torch.where(draw < (1 + self.noise) / 2, WRITE, READ))
        order[:, 0] = WRITE
        order[:, -1] = READ
        bits = torch.randint(2, (count, size), generator=generator)
        # the index of the latest write at or before each step
        latest = torch.where(order == WRITE, torch.arange(size), 0).cummax(dim=1).values
        memory = bits.gather(1, latest)
        bits = torch.where(order == READ, memory, bits)
        row = torch.stack((order, FIRST + bits), dim=2).flatten(1)
        targets = torch.full_like(row, IGNORE)
        targets[:, ::2] = torch.where(order == READ, FIRST + memory, IGNORE)
        # BOS shifts the inputs, so the target after an order is at that order's own index
        inputs = torch.cat((torch.full((count, 1), BOS), row), dim=1)
        return Batch(inputs[:, :-1], torch.cat((torch.full((count, 1), IGNORE), targets), dim=1)[:, :-1])
