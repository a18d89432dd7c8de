"""Which engine runs a call, and why. Nothing else decides this."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from ..core.errors import UnsupportedPlan
from ..core.torch_modes import is_exporting
from . import blocked, cpu, reference, sdpa, traced_bias, triton
from .base import Engine
from .lowering import Facts, LoweredPlan

ENGINES: dict[str, Engine] = {"triton": triton, "sdpa": sdpa, "cpu": cpu, "blocked": blocked, "reference": reference}
"""Every engine by name; `auto` takes the first that supports a call, in the order of `order_engines`."""


_STANDARD = list(ENGINES.values())


def is_standard() -> bool:
    """Whether no engine was added or replaced: only then may `plain_call` and `known_calls` bypass the choice."""
    return list(ENGINES.values()) == _STANDARD


class Choice(NamedTuple):
    """An engine's name, and why those before it do not run the call."""

    engine: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        because = "".join(f"\n  not {name}: {reason}" for name, reason in self.reasons.items())
        return f"engine {self.engine!r}{because}"


def register_engine(name: str, engine: Engine, *, before: str | None = "blocked") -> None:
    """Add an engine under a name. `auto` tries it before the engine `before`; None: only calls that name it run it.

    Raises ValueError for a name that is taken and TypeError for an engine without `supports` and `run`.

        >>> from posenc.engines import blocked
        >>> posenc.register_engine("mine", blocked)
        >>> "mine" in posenc.ENGINES
        True
    """
    if name == "auto" or name in ENGINES:
        raise ValueError(f"the name {name!r} is taken; the engines are {', '.join(ENGINES)}")
    missing = [method for method in ("supports", "run") if not callable(getattr(engine, method, None))]
    if missing:
        raise TypeError(f"an engine needs supports(lowered) and run(q, k, v, lowered); {engine!r} lacks {missing}")
    if before is not None and before not in ENGINES:
        raise ValueError(f"before={before!r} is not an engine; the engines are {', '.join(ENGINES)}")
    later = [] if before is None else list(ENGINES)[list(ENGINES).index(before) :]
    ENGINES[name] = engine  # None: after `blocked`, which supports everything
    for other in later:
        ENGINES[other] = ENGINES.pop(other)


def choose_engine(lowered: LoweredPlan, engine: str = "auto") -> Choice:
    """A named engine runs or raises; only "auto" goes on to the next."""
    if engine != "auto":
        if not isinstance(engine, str) or engine not in ENGINES:
            raise ValueError(f"engine={engine!r} is unknown; use 'auto' or one of {', '.join(map(repr, ENGINES))}")
        reason = ENGINES[engine].supports(lowered)
        if reason is not None:
            raise UnsupportedPlan(f"engine {engine!r} cannot run this: {reason}; engine='auto' tries the others")
        return Choice(engine, {})
    if is_exporting():
        return _choose_plain_operators(lowered)
    reasons: dict[str, str] = {}
    for name in order_engines(lowered.facts):
        reason = ENGINES[name].supports(lowered)
        if reason is None:
            if name == "blocked" and lowered.facts.device.type == "cuda":
                _warn_slow("; ".join(f"{other}: {why}" for other, why in reasons.items()))
            return Choice(name, reasons)
        reasons[name] = reason
    raise UnsupportedPlan("no engine can run this: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))


def _choose_plain_operators(lowered: LoweredPlan) -> Choice:
    """PyTorch's attention where nothing is added or masked, else the dense formula. Neither uses an operator of posenc, and
    neither compares lengths, which would specialise the exported program."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # torch.export has loaded it

    facts = lowered.facts
    reason = "an exported program contains standard PyTorch operators only, for every length"
    others = {name: reason for name in ENGINES if name not in ("sdpa", "reference")}
    is_square = statically_known_true(facts.q_length == facts.k_length)
    if facts.has_terms or (facts.is_limited and not is_square):
        why_not: str | None = "PyTorch's attention takes neither terms nor causality of fewer queries than keys"
    else:
        why_not = sdpa.supports(lowered)
    if why_not is None:
        return Choice("sdpa", others)
    return Choice("reference", {**others, "sdpa": why_not})


def order_engines(facts: Facts) -> list[str]:
    """The engines in the order in which `auto` tries them: as in ENGINES, except that

    on a GPU   plans without terms (none, absolute encodings, rotation) go to PyTorch's attention, which takes cuDNN or
               FlashAttention: 2.1 ms against 2.6 for a step at 4 x 4096 tokens of 16 heads, 94 µs against 101 at 64 x 128;
               tables over a grid go there as a dense bias: 0.25 ms against 2.0 for 4096 windows of 7 x 7, 3.1 against 22.7 for
               1024 windows of 16 x 16 (forward, one H200); so do short texts that are compiled (traced_bias.py)
    elsewhere  a dense bias is PyTorch's last, after the engine for CPUs; so is dropout, whose numbers PyTorch draws one by one
    """
    names = list(ENGINES)
    on_gpu = facts.device.type == "cuda"
    over_grid = facts.further_axes or (facts.positions == "tokens" and not facts.has_content)
    if on_gpu and (not facts.has_terms or over_grid or traced_bias.applies(facts)):
        names.remove("sdpa")
        names.insert(0, "sdpa")
    elif not on_gpu and (facts.has_terms or facts.dropout):
        names.remove("sdpa")
        names.insert(names.index("blocked"), "sdpa")
    return names


_warned: set[str] = set()


def _warn_slow(reasons: str) -> None:
    if not torch.compiler.is_compiling() and reasons not in _warned:
        _warned.add(reasons)
        warnings.warn(f"posenc computes dense scores in blocks on a GPU, because {reasons}", stacklevel=5)
