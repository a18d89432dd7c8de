"""The mask interface of attn_implementation="posenc": what transformers calls once in a forward pass.

A mask that transformers describes by its functions (causal, sliding window, packed texts, padding) becomes a `Mask`, which
holds no [L, L] tensor; any other becomes the dense one that "sdpa" makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel, masking_utils

from .. import Positions
from ..core import mask as mask_module
from . import rules
from .layer import log_once

ADDS_MASKS = frozenset({"deepseek_v4", "glm_moe_dsa"})
"""Models some of whose layers add the mask to their scores, or join other masks to it, before or without the interface; besides those
that are written for "eager" alone."""
SCORES = frozenset({"sinks", "s_aux", "softcap", "position_bias"})
"""Names in an eager attention whose models "sdpa" cannot run."""
ROWS = 128
"""Queries of a block of causal scores: what the mask hides of other keys is not computed."""
ALL = slice(None)
NOTHING_HIDDEN = {"causal": False, "window": None, "documents": None}


class Mask:
    """The visible keys of a forward pass, as `attend` takes them. As a tensor it is the dense boolean mask; added to scores, by a layer
    that calls no interface, it is the lowest number where masked."""

    def __init__(
        self, batch: int, queries: tuple[int, int], keys: tuple[int, int], key_mask: Tensor | None, *, causal: bool,
        window: tuple[int, int | None] | None, documents: Tensor | None, device: Any,
    ):  # fmt: skip
        self.batch, self.queries, self.keys = batch, queries, keys  # (first position, length)
        self.key_mask, self.causal, self.window, self.documents = key_mask, causal, window, documents
        self.device_of_mask = device
        self.has_padding = key_mask is not None and not nothing_padded(key_mask)
        self.kept: Tensor | None = None
        self.biased: tuple[Tensor, Tensor] | None = None
        self.fused: tuple[Any, tuple[Tensor | None, bool] | None] | None = None
        self.summand: tuple[Any, Tensor | None] | None = None

    @property
    def positions(self) -> Positions:
        return Positions(self.queries, self.keys)

    def options(self, *, shares: bool = False) -> dict[str, Any]:
        """`attend`'s mask arguments. `shares`: this is one rank's part of a sequence, and ranks need the same form."""
        found: dict[str, Any] = {"causal": self.causal and (shares or self.queries[1] > 1)}
        if self.key_mask is not None and (shares or self.has_padding):
            found["key_mask"] = self.key_mask
        if self.window is not None and self.window[0] + 1 < self.keys[1]:
            found["window"] = self.window
        if self.documents is not None:
            found["documents"] = self.documents
        return found

    def dense(self) -> Tensor:
        """bool [B, 1, Lq, Lk], made once; [B, 1, 1, Lk] where padding is all that it masks."""
        if self.kept is None:
            found = self.options()
            if "documents" in found:
                found["documents"] = self.documents, self.documents
            mask = mask_module.Mask(**found).allowed(self.queries[1], self.keys[1], self.device_of_mask)
            if mask is None:
                mask = torch.ones(1, 1, dtype=torch.bool, device=self.device_of_mask)
            self.kept = mask.expand(self.batch, 1, -1, self.keys[1])
        return self.kept

    def with_bias(self, bias: Tensor) -> Tensor:
        """The dense bias, -inf where masked; made once for layers that share a bias, unless it needs gradients: layers that
        are computed again in the backward pass would then have different graphs."""
        if self.biased is not None and self.biased[0] is bias:
            return self.biased[1]
        made = (bias if self.hides_nothing() else add_bias(self.dense(), bias)).contiguous()
        if not (bias.requires_grad and torch.is_grad_enabled()):
            self.biased = (bias, made)
        return made

    def hides_nothing(self) -> bool:
        return self.options() == {"causal": False}

    def for_kernel(self, dtype: torch.dtype, has_sink: bool = False) -> tuple[Tensor | None, bool] | None:
        """(mask, is_causal) of PyTorch's attention on a CPU, made once for all layers; None: an engine is faster. has_sink:
        there is one more key, for everybody."""
        if self.fused is None or self.fused[0] != (dtype, has_sink):
            self.fused = (dtype, has_sink), self._for_kernel(dtype, has_sink)
        return self.fused[1]

    def _for_kernel(self, dtype: torch.dtype, has_sink: bool) -> tuple[Tensor | None, bool] | None:
        options, pairs = self.options(), self.queries[1] * self.keys[1]
        causal = options.pop("causal")
        if not options and (not causal or (self.queries[1] == self.keys[1] and not has_sink)):
            return None, causal
        is_padding = not causal and options.keys() == {"key_mask"}
        if not is_padding and not rules.keeps_dense_mask(self.batch, pairs, "documents" in options):
            return None
        made = as_summand(self.dense(), dtype, -float("inf"))  # the kernel would make it of bool in every layer
        return nn.functional.pad(made, (0, 1)) if has_sink else made, False

    def for_formula(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores, made once for all layers: transformers' lowest number where masked, for a query without a
        visible key gives a mean then. None: nothing is masked."""
        if self.summand is None or self.summand[0] != dtype:
            made = None if self.hides_nothing() else as_summand(self.dense(), dtype, torch.finfo(dtype).min)
            self.summand = dtype, made
        return self.summand[1]

    def blocks(self) -> list[tuple[slice, slice]]:
        """(queries, the keys that they may see) of each block of a causal text."""
        options, length = self.options(), self.queries[1]
        if not options["causal"] or length != self.keys[1] or length <= 2 * ROWS:
            return [(ALL, ALL)]
        left, _ = options.get("window", (length, None))
        starts = range(0, length, ROWS)
        return [(slice(i, i + ROWS), slice(max(0, i - left), min(i + ROWS, length))) for i in starts]

    def whole(self) -> Tensor:
        return self.dense().expand(self.batch, 1, self.queries[1], self.keys[1])

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole().to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.whole()[index]

    def __invert__(self) -> Tensor:
        return ~self.whole()

    def __and__(self, other: Tensor) -> Tensor:
        return self.whole() & other

    def __or__(self, other: Tensor) -> Tensor:
        return self.whole() | other

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        adds = function.__name__.strip("_") in ("add", "radd", "iadd")
        summed = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()] if adds else []

        def read(x: Any) -> Any:
            if not isinstance(x, Mask):
                return x
            return as_summand(x.whole(), summed[0], torch.finfo(summed[0]).min) if summed else x.whole()

        args, kwargs = tree_map(read, (args, kwargs or {}))  # torch.cat: in a list
        return function(*args, **kwargs)


def nothing_padded(mask: Tensor) -> bool:
    """Whether it is known that every token is real: read on a CPU only, where that costs no synchronisation."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function, attention_mask: Tensor | None = None,
    local_size: int | None = None, **kwargs: Any,
) -> Mask | Tensor | None:  # fmt: skip
    """What transformers' mask functions ask for: a `Mask`, or the dense mask of "sdpa" where none can say it."""
    if isinstance(attention_mask, Mask):  # `generate` makes masks before the model does
        return attention_mask
    config = kwargs.get("config")
    adds_mask = getattr(config, "model_type", None) in ADDS_MASKS
    adds_mask = adds_mask or is_eager_only(_modeling(type(config)), type(config).__name__)
    if not adds_mask and not _has_interface(_modeling(type(config))):  # type: ignore[arg-type]
        adds_mask = True
        log_once(
            f"{type(config).__name__.removesuffix('Config')} calls no attention interface, and "
            "attn_implementation='posenc' runs its own attention; posenc.hf.accelerate(model) overrides it where it can"
        )
    given = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **kwargs,
    )  # fmt: skip
    if adds_mask:
        return masking_utils.eager_mask(**given)
    found = None if isinstance(q_offset, Tensor) else _read(mask_function, local_size, kwargs)  # Tensor: a static cache
    is_limited = found is not None and (found["causal"] or found["window"] is not None)
    if found is None or (is_limited and q_offset + q_length != kv_offset + kv_length):
        return masking_utils.sdpa_mask(**given)  # `attend` aligns the last query with the last key
    key_mask = attention_mask
    if key_mask is None and found == NOTHING_HIDDEN and kwargs.get("allow_is_bidirectional_skip"):
        return None  # as for "sdpa": models with a bias of their own add masks to it
    if key_mask is not None:
        key_mask = masking_utils.prepare_padding_mask(key_mask, kv_length, kv_offset)
        key_mask = key_mask[:, kv_offset : kv_offset + kv_length].expand(batch_size, -1)
    return Mask(
        batch_size, (q_offset, q_length), (kv_offset, kv_length), key_mask, device=kwargs.get("device", "cpu"), **found
    )


def _modeling(config: type) -> str:
    """The file of a configuration's models."""
    return config.__module__.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result
def _has_interface(file: str) -> bool:
    """Whether the models of a file can call the interface: others add their masks to their scores."""
    module = sys.modules.get(file) if file.startswith("transformers.models.") else None
    return module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS")


@torch.compiler.assume_constant_result
def is_eager_only(file: str, config: str | None = None) -> bool:
    """Whether the models of a layer's file, or those of a configuration in it, support no "sdpa", and not because of their scores (a sink,
    a cap, a bias). What they do with masks besides is then written for additive ones (Informer, NLLB-MoE, Gemma 4's audio), and
    nothing has ever read `is_causal` of their layers (BridgeTower's is True where both sides are visible)."""
    return _is_eager_only(file, config)


@cache
def _is_eager_only(file: str, config: str | None) -> bool:
    own = vars(sys.modules[file]) if file in sys.modules else {}
    models: Any = [one for one in own.values() if isinstance(one, type) and one.__module__ == file]
    models = [one for one in models if issubclass(one, PreTrainedModel)]
    of_config = [one for one in models if getattr(one.config_class, "__name__", None) == config]
    if not models or any(one._supports_sdpa for one in of_config or models):
        return False
    code = getattr(own.get("eager_attention_forward"), "__code__", None)
    by_scores = code is not None and not SCORES.isdisjoint((*code.co_names, *code.co_varnames))
    return not by_scores or any(one._supports_sdpa for one in models)  # scores that others of the file have


def _read(function: Callable, local_size: int | None, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """causal, window and documents of a mask function, or None."""
    found: dict[str, Any] = dict(NOTHING_HIDDEN)
    plain = function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if plain or not torch.compiler.is_compiling():
        return found if _read_closure(function, found) else None
    # a compiled call cannot look into a closure; without other overlays causal layers have a window and nothing else
    config = kwargs.get("config")
    window = getattr(config, "sliding_window", None)
    alone = kwargs.get("allow_is_causal_skip") and not getattr(config, "attention_chunk_size", None)
    if alone and local_size is not None and local_size == window and getattr(config, "is_causal", True):
        return {**found, "causal": True, "window": (local_size - 1, None)}
    return None


def _read_closure(function: Callable, found: dict[str, Any]) -> bool:
    if function is masking_utils.causal_mask_function:
        found["causal"] = True
        return True
    if function is masking_utils.bidirectional_mask_function:
        return True
    name = getattr(function, "__qualname__", "").split(".<locals>")[0]
    if getattr(function, "__module__", None) != masking_utils.__name__ or name not in _known():
        return False
    cells = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    if name == "and_masks":
        return all(_read_closure(one, found) for one in cells["mask_functions"])
    if name == "remap_positions_for_packed_sequence":
        # positions count by one within a text, so distances stay; pairs of two texts are masked, if texts are (they come first)
        return found["documents"] is not None and _read_closure(cells["mask_function"], found)
    if name == "packed_sequence_mask_function" and found["documents"] is None:
        found["documents"] = cells["packed_sequence_mask"]
        return True
    if found["window"] is not None or (found["documents"] is not None and name == "packed_sequence_mask_function"):
        return False
    size = cells["sliding_window"]
    found["window"] = (size - 1, None) if name == "sliding_window_overlay" else (size, size)
    return True


@cache
def _known() -> frozenset[str]:
    """The mask functions of transformers that mean here what `_read_closure` reads in them."""
    slots = torch.arange(7, device="cpu")  # whatever the default device is: the result is kept
    q, k, zero = slots[:, None], slots[None, :], slots[:1, None]
    texts = torch.tensor([[0, 0, 0, 1, 1, 2, 2]], device="cpu")
    wanted = {
        "sliding_window_overlay": (3, k > q - 3),
        "sliding_window_bidirectional_overlay": (3, (q - k).abs() <= 3),
        "packed_sequence_mask_function": (texts, texts[0][q] == texts[0][k]),
    }
    known = {"and_masks"}
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if remap is not None:
        positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1]], device="cpu")
        made = remap(lambda b, h, i, j: i - j, positions)
        if made.__code__.co_freevars == ("mask_function", "position_ids") and torch.equal(
            made(zero, zero, q, k), positions[0][q] - positions[0][k]
        ):
            known.add(remap.__name__)
    for name, (argument, mask) in wanted.items():
        make = getattr(masking_utils, name, None)
        variable = "packed_sequence_mask" if name.startswith("packed") else "sliding_window"
        made = None if make is None else make(argument)
        if made is not None and made.__code__.co_freevars == (variable,) and torch.equal(made(zero, zero, q, k), mask):
            known.add(name)
    return frozenset(known)


def add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    # transformers' own number: a query without a visible key gives a mean, not NaN
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def as_summand(mask: Tensor, dtype: torch.dtype, lowest: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)
