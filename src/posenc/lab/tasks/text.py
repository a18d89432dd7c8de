"""Text: predict the next byte of real text. The size is the length of the window."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import LabError
from . import Batch, Task

BYTES = 256  # 256 is BOS


class Text(Task):
    """Training windows start anywhere in the training part; evaluation uses the held-out part from its beginning,
    the same bytes at every window length.

        non-overlapping   |------|------|------|     every byte counts, also the first ones of a window
        sliding           |------|                   only the last `stride` bytes of a window count, so that each
                            |------|                 counted byte has at least length - stride bytes before it
    """

    summary = "predict the next byte of real text"
    metric = "loss"
    needs_text = True
    varies = False
    vocabulary = BYTES + 1

    def __init__(self):
        self.train: Tensor | None = None
        self.held_out: Tensor | None = None

    def load(self, train: Tensor, held_out: Tensor) -> None:
        """uint8 bytes, on the device that the model is on."""
        self.train, self.held_out = train, held_out

    def length(self, size):
        return size

    def batch(self, size, count, generator):
        assert self.train is not None, "load the text first"
        if self.train.shape[0] <= size:
            raise LabError(f"the text has {self.train.shape[0]} bytes to train on, fewer than one window of {size}")
        starts = torch.randint(self.train.shape[0] - size, (count,), generator=generator).to(self.train.device)
        return self._windows(self.train, starts, size)

    def windows(self, size: int, bytes_: int) -> Batch:
        """The first `bytes_` held-out bytes as non-overlapping windows [n, size]."""
        assert self.held_out is not None, "load the text first"
        number = min(bytes_, self.held_out.shape[0]) // size
        if number == 0:
            raise LabError(f"{min(bytes_, self.held_out.shape[0])} held-out bytes are fewer than one window of {size}")
        return self._windows(self.held_out, torch.arange(number, device=self.held_out.device) * size, size)

    def sliding(self, size: int, stride: int, number: int, first: int) -> Batch:
        """`number` windows [n, size] whose counted last `stride` bytes follow one another from the byte `first` on:
        the same bytes whatever the size."""
        assert self.held_out is not None, "load the text first"
        ends = first + stride * torch.arange(1, number + 1, device=self.held_out.device)
        if first + stride < size or int(ends[-1]) > self.held_out.shape[0]:
            raise LabError(f"the held-out text is too short for {number} sliding windows of {size} bytes from {first}")
        return self._windows(self.held_out, ends - size, size)

    @staticmethod
    def _windows(text: Tensor, starts: Tensor, size: int) -> Batch:
        rows = text[starts[:, None] + torch.arange(size, device=text.device)].long()
        bos = torch.full((rows.shape[0], 1), BYTES, device=text.device)
        return Batch(torch.cat((bos, rows[:, :-1]), dim=1), rows)
