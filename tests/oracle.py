"""Recorded oracles (tests/data/*.json, see make_oracles.py) as tensors."""

import json
from pathlib import Path

import torch


def cases(name):
    return json.loads((Path(__file__).parent / "data" / f"{name}.json").read_text())["cases"]


def tensor(numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def copy(parameter, numbers):
    """Load numbers into a parameter of the same shape."""
    source = numbers if isinstance(numbers, torch.Tensor) else tensor(numbers)
    assert parameter.shape == source.shape, (parameter.shape, source.shape)
    with torch.no_grad():
        parameter.copy_(source)
