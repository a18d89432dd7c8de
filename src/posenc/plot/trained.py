"""Tables of trained models for the figures: an untrained table draws as noise, which is not what a model learns.

trained.json holds the tables of small models of the lab, with their origin; docs/trained_tables.py made it. A table is known
for each distance, so it fits any option of its encoding that only regroups distances (buckets, max_distance, causal): a
row of the new table is the mean over the distances that read it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from ..core.index import Index
from ..encodings import spec
from ..encodings.registry import create

NAMES = ("t5", "clipped", "shaw")
REGROUP = {"buckets", "max_distance", "left", "right", "causal", "outside", "scale"}
"""Options that change which distances share a row, but not what a row is."""


@cache
def _file() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath("trained.json").read_text(encoding="utf-8"))


def origin() -> dict[str, Any]:
    """The settings of the models and of their training."""
    return _file()["origin"]


def sizes() -> dict[str, int]:
    """The sizes of the models' layers: d_model and heads."""
    return {"d_model": origin()["width"], "heads": origin()["heads"]}


def fits(name: str, options: dict[str, Any]) -> bool:
    """Whether a trained table exists for an encoding with these options."""
    return name in NAMES and set(options) <= REGROUP


@cache
def _rows(name: str) -> tuple[Index, Tensor]:
    """(index, table [rows, heads or head_dim]) of the trained model."""
    entry = _file()["encodings"][name]
    trained_name, options = spec.parse(entry["encoding"])
    table = torch.tensor(entry["table"], dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay
        made: Any = create(trained_name, **sizes(), **options)
    return made.index, table.t() if name == "clipped" else table


def queries(name: str) -> Tensor | None:
    """The mean query of each head [heads, head_dim] in the trained model, for encodings whose term depends on it."""
    found = _file()["encodings"][name].get("query")
    return None if found is None else torch.tensor(found, dtype=torch.float64)


@torch.no_grad()
def fill(name: str, encoding: Any) -> None:
    """Set the table of an encoding of these sizes to the trained one."""
    index, table = _rows(name)
    ends = [abs(end) for each in (index, encoding.index) for end in (each.lo, each.hi)]
    # a causal table has one row for all later keys, which are masked: it is that of distance 0
    last = 0 if getattr(encoding, "causal", False) else max(ends)
    r = torch.arange(-max(ends), last + 1)
    values = table[index.lookup(r)]
    own = _own_table(name, encoding)
    rows = encoding.index.lookup(r) - int(getattr(encoding, "outside", "clip") == "zero")
    inside = (rows >= 0) & (rows < len(own))  # outside="zero": rows past the table read nothing
    sums = torch.zeros(len(own), values.shape[1], dtype=torch.float64).index_add_(0, rows[inside], values[inside])
    number = rows[inside].bincount(minlength=len(own)).clamp(min=1)
    own.copy_((sums / number[:, None])[:, : own.shape[1]])


def _own_table(name: str, encoding: Any) -> Tensor:
    """The encoding's table as [rows, columns], a view."""
    if name == "shaw":
        return encoding.keys[0].data
    return encoding.table.data.t() if name == "clipped" else encoding.table.data
