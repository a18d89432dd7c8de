"""Tasks: one small file each, found by listing this folder. Adding one touches nothing else.

A file defines one subclass of `Task`; its name is the file's. A problem has a size n (symbols to copy, digits to add,
bytes of text); training draws sizes up to the preset's `train`, testing uses the preset's `test` sizes, most of them
larger. Every sequence opens with BOS, and the loss counts answers only.

    inputs    BOS  a  b  SEP  a        [B, L]
    targets    -   -  -   a   b        [B, L], "-" is IGNORE: no loss there

Teacher forcing gives exact matches too: greedy decoding writes the right answer exactly when each of its tokens is
the most likely one after the right ones before it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...encodings.spec import parse_options
from ..errors import LabError

BOS, SEP, FIRST = 0, 1, 2  # symbols start at FIRST
IGNORE = -100


class Batch(NamedTuple):
    inputs: Tensor  # [B, L]
    targets: Tensor  # [B, L]


class Task:
    """What every task is."""

    name: ClassVar[str]
    summary: ClassVar[str]
    causal: ClassVar[bool] = True
    metric: ClassVar[Literal["accuracy", "loss"]] = "accuracy"
    needs_text: ClassVar[bool] = False
    varies: ClassVar[bool] = True
    """Whether training draws sizes from the least to the largest."""
    least: ClassVar[int] = 1
    vocabulary: int

    def batch(self, size: int, count: int, generator: torch.Generator) -> Batch:
        """`count` problems of one size."""
        raise NotImplementedError

    def length(self, size: int) -> int:
        """Tokens that the model reads in a problem of this size."""
        return self.batch(size, 1, torch.Generator().manual_seed(0)).inputs.shape[1]


def names() -> list[str]:
    """Every task's name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def create(text: str) -> Task:
    """A task from its specification, such as copy:unique=true."""
    name, options = parse_options(text)
    cls = task_class(name)
    accepted = [p for p in inspect.signature(cls).parameters if p not in ("args", "kwargs")]
    unknown = [option for option in options if option not in accepted]
    if unknown:
        raise LabError(
            f"task {name} has no option {', '.join(unknown)}; "
            + (f"its options are {', '.join(accepted)}" if accepted else "it takes none")
        )
    try:
        return cls(**options)
    except (ValueError, TypeError) as error:
        raise LabError(f"task {text}: {error}") from None


@cache
def task_class(name: str) -> type[Task]:
    if name not in names():
        raise LabError(f"unknown task {name!r}; the tasks are {', '.join(names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    found: list[Any] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise LabError(f"the task file {name}.py must define one Task, it defines {len(found)}")
    found[0].name = name
    return found[0]


def question_and_answer(question: Tensor, answer: Tensor) -> Batch:
    """BOS question SEP answer, with the answer's tokens as targets. question [B, n], answer [B, m]."""
    count = question.shape[0]
    bos, sep = (torch.full((count, 1), symbol, dtype=torch.int64) for symbol in (BOS, SEP))
    row = torch.cat((bos, question, sep, answer), dim=1)
    targets = row[:, 1:].clone()
    targets[:, : question.shape[1] + 1] = IGNORE
    return Batch(row[:, :-1], targets)


def symbols(count: int, size: int, number: int, generator: torch.Generator, *, unique: bool = False) -> Tensor:
    """Random symbols [count, size] out of `number`, as token ids."""
    if unique:
        if size > number:
            raise LabError(f"size {size} needs {size} different symbols, the task has {number}; give it more symbols")
        return FIRST + torch.rand(count, number, generator=generator).argsort(dim=1)[:, :size]
    return FIRST + torch.randint(number, (count, size), generator=generator)
