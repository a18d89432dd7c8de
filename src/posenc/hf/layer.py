"""Part and Layer: the base classes of everything that `accelerate` swaps.

A swap changes the class of one module to a subclass, with the same parameters, buffers and hooks. Nothing is copied, so
state_dict, deepcopy, pickle and training work as before, and changing the class back undoes the swap.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .. import Index, Plan, Positions, attend

Sample = tuple[int, int, Plan, dict[str, Any]]
"""Heads, head size, plan and mask options of a call."""
logger = logging.getLogger("posenc.hf")
NO_CACHE = (
    "context_parallel is for whole sequences (training, prefill), and this call continues a cache; generate with a model that is "
    "accelerated without it"
)
NO_ATTENTIONS = "output_attentions=True needs all scores in one process, and context_parallel shares the sequence; leave one of them out"


class Replacement:
    """What `accelerate` asks about a module of the class `original` before it changes it, in either of its two ways (family.py)."""

    original: type[nn.Module]
    relies_on: Mapping[str, tuple[str, ...]] = {}
    """Method of the original -> the names of the arguments that it must take, in this order, others after them."""

    @staticmethod
    def concerns(module: Any) -> bool:
        """Whether this module has a positional term; one without is left unchanged."""
        return True

    @staticmethod
    def refuses(module: Any) -> str | None:
        """Why this module cannot be accelerated, or None."""
        return None


class Part(Replacement, nn.Module):
    """Base of every swapped module."""

    posenc_context: Any = None
    """The ranks that share each sequence, a posenc.parallel.ContextParallel; tokens are then this rank's part."""

    if TYPE_CHECKING:  # the attributes are transformers'

        def __getattr__(self, name: str) -> Any: ...

    def posenc_prepare(self) -> None:
        """Store what is the same for every call in attributes named posenc_*; `restore` deletes them."""


class Layer(Part):
    """An attention layer."""

    encoding: str
    posenc_engine = "auto"
    posenc_shares_sequences = False
    """Whether it can be one of several ranks that share a sequence."""

    def posenc_index_of(self) -> Index | None:
        """The index of its distances where it does not depend on the length; ValueError where none exists. `accelerate` also
        calls it with the original module, before the swap."""
        return None

    def posenc_prepare(self) -> None:
        self.posenc_index: Any = self.posenc_index_of()

    def posenc_sample(self, length: int) -> Sample:
        """A typical call, for `report`, where `on_cpu` and `on_gpu` do not say what runs."""
        raise NotImplementedError

    def posenc_planned(
        self, make: Callable[[Positions], Plan], positions: Positions
    ) -> Plan | Callable[[Positions], Plan]:
        """The plan of a call; where ranks share the sequence, the function itself, which is called for other positions too."""
        if self.posenc_context is None:
            return make(positions)
        if positions.runs is None or not isinstance(positions.runs[0].start, int) or positions.runs[0].start != 0:
            raise ValueError(NO_CACHE)
        return make

    def posenc_length(self, q: Tensor) -> int:
        """Queries of the whole sequence."""
        return q.shape[2] * (1 if self.posenc_context is None else self.posenc_context.size)

    def posenc_run(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Plan | Callable[[Positions], Plan], options: dict[str, Any], dropout: float,
        fully_masked: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """[B, H, L, D] -> [B, L, H * D], dropout in training only.

        fully_masked [B or 1, L]: queries without a visible key. The originals give all their keys one score, so the output
        is the mean of the values. Where ranks share the sequence these queries, which are padding, give zeros.
        """
        dropout = dropout if self.training else 0.0
        if self.posenc_context is not None:
            assert not isinstance(plan, Plan)
            out = attend_together(q, k, v, plan, self.posenc_context, self.posenc_engine, dropout, options)
            return out.transpose(1, 2).flatten(2)
        assert isinstance(plan, Plan)
        out = attend(q, k, v, plan, dropout=dropout, engine=self.posenc_engine, **options)
        if fully_masked is not None:
            out = torch.where(fully_masked[:, None, :, None], v.mean(2, keepdim=True), out)
        return out.transpose(1, 2).flatten(2)

    def posenc_run_dense(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
    ) -> Tensor:
        """[B, H, L, D] -> [B, L, H * D] with a dense bias, masks included: PyTorch's attention takes that on every device, its
        gradient too; `attend` with a named engine."""
        dropout = dropout if self.training else 0.0
        if self.posenc_engine == "auto":
            if bias is not None and bias.dtype != torch.bool:
                bias = bias.to(q.dtype)
            out = scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=scale)
        else:
            plan = Plan(Positions((k.shape[2] - q.shape[2], q.shape[2]), k.shape[2]), scale=scale)
            out = attend(q, k, v, plan, dropout=dropout, engine=self.posenc_engine, mask=bias)
        return out.transpose(1, 2).flatten(2)


def attend_together(
    q: Tensor, k: Tensor, v: Tensor, make: Callable[[Positions], Plan], context: Any, engine: str, dropout: float, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """`attend` where ranks share the sequence; make: positions -> the plan."""
    from ..parallel.functional import attend as attend_parts
    from ..parallel.plan_tensors import FixedPlan

    return attend_parts(
        q, k, v, FixedPlan(make), context_parallel=context, engine=engine, dropout=dropout, table_gradients="local", **options
    )  # fmt: skip


def own_class(cls: type) -> type:
    """A module's class without that of fully_shard (FSDP2), which derives a class of its own from each that it shards."""
    return cls.__bases__[1] if cls.__module__.startswith("torch.distributed.") and len(cls.__bases__) == 2 else cls


def _make_sharded(like: type, cls: type) -> type:
    kept = {name: value for name, value in vars(like).items() if name in ("__module__", "__deepcopy__")}
    prefix = like.__name__.removesuffix(own_class(like).__name__)
    return type(prefix + cls.__name__, (like.__bases__[0], cls), kept)


_sharded: Callable[[type, type], type] = cache(_make_sharded)
"""(like, cls): `cls` as fully_shard made the class `like` of another."""


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, sharded if it is. The hooks of accelerate (device_map over several devices) keep the former class's
    forward, bound, in the module."""
    now = type(module)
    before = now.forward
    module.__class__ = cls if own_class(now) is now else _sharded(now, cls)  # type: ignore[assignment]
    for name in ("_old_forward", "forward"):
        if getattr(module.__dict__.get(name), "__func__", None) is before:
            module.__dict__[name] = MethodType(cls.forward, module)


class NoAttentions:
    """output_attentions=False that carries arguments to the layers: it is false, and models pass it on unchanged."""

    def __bool__(self) -> bool:
        return False


def split(projected: Tensor, size: int) -> Tensor:
    """[B, L, H * size] -> [B, H, L, size]."""
    return projected.unflatten(-1, (-1, size)).transpose(1, 2)


def zeros_beside(linear: nn.Module, *shape: int) -> Tensor:
    """Zeros on a linear layer's device in the dtype that it computes in. Quantised weights have no new_zeros, and PyTorch's own
    quantised layers have a method in place of the weight and no parameters."""
    found = getattr(linear, "weight", None)
    if not isinstance(found, Tensor):
        found = found() if callable(found) else next(itertools.chain(linear.parameters(), linear.buffers()), None)
    if found is None:
        return torch.zeros(shape)
    dtype = found.dtype if found.dtype.is_floating_point else torch.get_default_dtype()
    return torch.zeros(shape, dtype=dtype, device=found.device)


_logged: set[str] = set()


def log_once(text: str) -> None:
    """Log a warning once in a process."""
    if text not in _logged and not torch.compiler.is_compiling():
        _logged.add(text)
        logger.warning(text)
