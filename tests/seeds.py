"""Where every random number of the tests comes from: POSENC_SEED=3 make test draws other numbers than make test does."""

import os
import random
import zlib

import torch

OFFSET = int(os.environ.get("POSENC_SEED", "0"))


def seed(base: int = 0) -> int:
    """The seed that stands for `base` in this run."""
    return base + OFFSET


def generator(base: int = 0, device="cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed(base))


def of(name: str) -> int:
    """A seed of this name's own, the same in every process."""
    return seed(zlib.crc32(name.encode()))


def everything(number: int) -> None:
    """Seed all that draws from a global generator: torch, random and, where it is installed, numpy."""
    torch.manual_seed(number)
    random.seed(number)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(number % 2**32)
