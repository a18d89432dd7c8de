"""Associative recall at a distance: k1 v1 k2 v2 .. (noise, n tokens) k2 → v2."""

from __future__ import annotations

import torch

from . import FIRST, Task, question_and_answer, symbols


class Recall(Task):
    """The size is the noise between the pairs and the question: how far back the pairs are."""

    summary = "find a pair again after n tokens of noise"

    def __init__(self, pairs: int = 4, keys: int = 16, values: int = 16):
        self.pairs, self.keys, self.values = pairs, keys, values
        self.noise = 8
        self.vocabulary = FIRST + keys + values + self.noise

    def batch(self, size, count, generator):
        keys = symbols(count, self.pairs, self.keys, generator, unique=True)
        values = self.keys + symbols(count, self.pairs, self.values, generator)
        noise = self.keys + self.values + symbols(count, size, self.noise, generator)
        which = torch.randint(self.pairs, (count, 1), generator=generator)
        stored = torch.stack((keys, values), dim=2).flatten(1)
        return question_and_answer(torch.cat((stored, noise, keys.gather(1, which)), dim=1), values.gather(1, which))
