"""attn_implementation="posenc": transformers' attention interface and mask interface.

    import posenc.hf
    AutoModel.from_pretrained(name, attn_implementation="posenc")
    model.set_attn_implementation("posenc")

`make_mask` is what transformers calls once in a forward pass, `attention` in every layer. A mask that transformers describes
by its functions (causal, sliding window, packed texts, padding) becomes a `Mask`, which holds no [L, L] tensor; any other
becomes the dense one that "sdpa" makes. A call without positional terms and with a mask that PyTorch's kernels take is
transformers' own "sdpa" function. Terms come from the layers that `accelerate` prepares (`posenc_layer`, see family.py), or
dense as `position_bias`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import output_capturing

from .. import Plan, Positions, attend
from ..core.precision import autocast_is_on
from ..core.torch_modes import is_exporting
from ..functional import scores
from . import rules
from .layer import log_once

NAME = "posenc"
COLLECTED = getattr(output_capturing, "_active_collector", None)
ADDS_MASKS = frozenset({"bigbird_pegasus", "deepseek_v4", "git", "glm_moe_dsa"})
"""Models some of whose layers add the mask to their scores, or join other masks to it, before or without the interface."""
NO_TERMS: Any = object()
"""What `plan_of` returns for a call without terms, whatever its `position_bias` is."""
ROWS = 128
"""Queries of a block of causal scores: what the mask hides of other keys is not computed."""
ALL = slice(None)
PRECISE = (torch.float32, torch.float64)


class Mask:
    """The visible keys of a forward pass, as `attend` takes them. As a tensor it is the dense boolean mask."""

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
            q = torch.arange(self.queries[1], device=self.device_of_mask)[:, None] + self.queries[0]
            k = torch.arange(self.keys[1], device=self.device_of_mask) + self.keys[0]
            left, right = found.get("window", (None, None))
            mask = None
            if found["causal"]:
                mask = k <= q
            if left is not None:
                mask = k >= q - left if mask is None else mask & (k >= q - left)
            if right is not None:
                mask = k <= q + right if mask is None else mask & (k <= q + right)
            if "documents" in found:
                same = (self.documents[:, :, None] == self.documents[:, None, :])[:, None]  # type: ignore[index]
                mask = same if mask is None else mask & same
            if "key_mask" in found:
                real = found["key_mask"][:, None, None, :]
                mask = real if mask is None else mask & real
            if mask is None:
                mask = torch.ones(1, 1, dtype=torch.bool, device=self.device_of_mask)
            self.kept = mask.expand(self.batch, 1, -1, self.keys[1])
        return self.kept

    def with_bias(self, bias: Tensor) -> Tensor:
        """The dense bias, -inf where masked; made once for layers that share a bias, unless it needs gradients: layers that
        are computed again in the backward pass would then have different graphs."""
        if self.biased is not None and self.biased[0] is bias:
            return self.biased[1]
        made = (bias if self.hides_nothing() else _add(self.dense(), bias)).contiguous()
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
        made = _as_summand(self.dense(), dtype, -float("inf"))  # the kernel would make it of bool in every layer
        return nn.functional.pad(made, (0, 1)) if has_sink else made, False

    def for_formula(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to scores, made once for all layers: transformers' lowest number where masked, for a query without a
        visible key gives a mean then. None: nothing is masked."""
        if self.summand is None or self.summand[0] != dtype:
            made = None if self.hides_nothing() else _as_summand(self.dense(), dtype, torch.finfo(dtype).min)
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
        args, kwargs = tree_map(
            lambda x: x.whole() if isinstance(x, Mask) else x, (args, kwargs or {})
        )  # torch.cat: in a list
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
    if not adds_mask and not _has_interface(type(config)):  # type: ignore[arg-type]
        adds_mask = True
        log_once(
            f"{type(config).__name__.removesuffix('Config')} calls no attention interface, and "
            "attn_implementation='posenc' runs its own attention; posenc.hf.accelerate(model) overrides it where it can"
        )
    if adds_mask:
        return masking_utils.eager_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **kwargs,
        )  # fmt: skip
    found = None if isinstance(q_offset, Tensor) else _read(mask_function, local_size, kwargs)  # Tensor: a static cache
    if (
        found is not None
        and (found["causal"] or found["window"] is not None)
        and q_offset + q_length != kv_offset + kv_length
    ):
        found = None  # `attend` aligns the last query with the last key
    if found is None:
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **kwargs,
        )  # fmt: skip
    key_mask = attention_mask
    if key_mask is not None:
        key_mask = masking_utils.prepare_padding_mask(key_mask, kv_length, kv_offset)[
            :, kv_offset : kv_offset + kv_length
        ]
        key_mask = key_mask.expand(batch_size, -1)
    return Mask(
        batch_size, (q_offset, q_length), (kv_offset, kv_length), key_mask, device=kwargs.get("device", "cpu"), **found
    )


@cache
def _has_interface(config: type) -> bool:
    """Whether the models of a configuration can call the interface: others add their masks to their scores."""
    name = config.__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name) if name.startswith("transformers.models.") else None
    return module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS")


def _read(function: Callable, local_size: int | None, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """causal, window and documents of a mask function, or None."""
    found: dict[str, Any] = {"causal": False, "window": None, "documents": None}
    if function is masking_utils.causal_mask_function:
        return {**found, "causal": True}
    if function is masking_utils.bidirectional_mask_function:
        return found
    if not torch.compiler.is_compiling():
        return found if _read_closure(function, found) else None
    # a compiled call cannot look into a closure; without other overlays causal layers have a window and nothing else
    config = kwargs.get("config")
    window = getattr(config, "sliding_window", None)
    plain = kwargs.get("allow_is_causal_skip") and not getattr(config, "attention_chunk_size", None)
    if plain and local_size is not None and local_size == window and getattr(config, "is_causal", True):
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
    q, k = torch.arange(7)[:, None], torch.arange(7)[None, :]
    zero, texts = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    wanted = {
        "sliding_window_overlay": (3, k > q - 3),
        "sliding_window_bidirectional_overlay": (3, (q - k).abs() <= 3),
        "packed_sequence_mask_function": (texts, texts[0][q] == texts[0][k]),
    }
    known = {"and_masks"}
    for name, (argument, mask) in wanted.items():
        make = getattr(masking_utils, name, None)
        variable = "packed_sequence_mask" if name.startswith("packed") else "sliding_window"
        made = None if make is None else make(argument)
        if made is not None and made.__code__.co_freevars == (variable,) and torch.equal(made(zero, zero, q, k), mask):
            known.add(name)
    return frozenset(known)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, position_bias: Any = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """[B, H, L, D] each -> (out [B, L, H, D], probabilities where output_attentions is True, else None)."""
    if autocast_is_on(query.device):  # rotated queries and keys may be float32 beside values of the lower precision
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    own = module.__dict__
    layer, engine, context = own.get("posenc_layer"), own.get("posenc_engine", "auto"), own.get("posenc_context")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]:
        # the start of a text in an empty static cache, for which transformers makes no mask: the rest of its slots is empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        if isinstance(position_bias, Tensor) and position_bias.dim() == 4:
            position_bias = position_bias[..., : query.shape[2]]
    if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
        attention_mask = _selected(module, query, key, attention_mask, kwargs)
    wants = bool(kwargs.get("output_attentions")) or _are_collected()
    make = None
    if layer is not None:
        make = layer.plan_of(module, position_bias, scaling, query, {**kwargs, "attention_mask": attention_mask})
        if make is NO_TERMS:
            make = position_bias = None
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    plain = make is None and not wants and engine == "auto" and context is None
    plain = plain and not is_exporting()  # `attend` chooses what can be exported for every length
    if plain and query.is_cpu and kwargs.get("cache") is None and not torch.compiler.is_compiling():
        if sinks is None:
            out = _on_cpu(query, key, value, attention_mask, position_bias, causal, scaling, dropout, softcap)
        else:
            extra = position_bias is not None or softcap is not None or dropout > 0.0
            out = None if extra else _beside_sink(query, key, value, attention_mask, sinks, scaling)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    options = _options(attention_mask, query, key, causal, context is not None)
    if make is None and position_bias is not None:
        bias = position_bias if isinstance(position_bias, Tensor) else position_bias.dense()
        if isinstance(attention_mask, Mask) and context is None and bias.shape[-1] == key.shape[2]:
            options = {"mask": attention_mask.with_bias(bias)}
        else:
            options["mask"] = _add(options.get("mask"), bias)
    plain = plain and softcap is None and sinks is None
    if plain and (kwargs.get("cache") is not None or _is_sdpa(options, query, key)):
        return _by_sdpa(module, query, key, value, options, scaling, dropout, kwargs)
    if make is None:
        make = partial(Plan, scale=scaling, sinks=sinks)
    if context is not None:
        from ..parallel.functional import attend as attend_together
        from ..parallel.plan_tensors import FixedPlan

        if wants:
            raise ValueError(
                "output_attentions=True needs all scores in one process, and context_parallel shares the sequence; "
                "leave one of them out"
            )
        if query.shape[2] != key.shape[2] and options.get("causal"):
            raise ValueError(
                "context_parallel is for whole sequences (training, prefill), and this call continues a cache; "
                "generate with a model that is accelerated without it"
            )
        out = attend_together(
            query, key, value, FixedPlan(make), context_parallel=context, engine=engine, dropout=dropout,
            table_gradients="local", **options,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    plan = make(_positions(attention_mask, query, key))
    if wants or softcap is not None:
        out, weights = _by_scores(query, key, value, plan, options, dropout, softcap)
        return out, weights if wants else None
    return attend(query, key, value, plan, dropout=dropout, engine=engine, **options).transpose(1, 2).contiguous(), None


def _are_collected() -> bool:
    """Whether transformers collects probabilities by hooks in this forward pass: not every model passes output_attentions on."""
    collected = None if COLLECTED is None else COLLECTED.get()
    return collected is not None and any("attentions" in name for name in collected)


def _selected(module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
    """The mask of the keys that an indexer has selected for each query, which models add to the mask themselves for "eager"
    and "sdpa" alone."""
    mask = mask.whole() if isinstance(mask, Mask) else mask
    if kwargs.get("indices") is None:
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)[None]
        return module.indexer.build_block_mask(  # type: ignore[union-attr, operator]
            kwargs["block_indices"], mask, key.shape[2], query.dtype, query.device, positions.expand(query.shape[0], -1)
        )
    indices = kwargs["indices"].long()
    chosen = indices.new_zeros((*indices.shape[:2], key.shape[2]), dtype=torch.bool).scatter(-1, indices, True)[:, None]
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _options(mask: Any, query: Tensor, key: Tensor, causal: bool, shares: bool) -> dict[str, Any]:
    """`attend`'s mask arguments."""
    if isinstance(mask, Mask):
        whole = mask.documents is None and mask.window is None and not mask.causal  # padding is checked by `attend`
        if not (shares or whole) and (mask.queries[1], mask.keys[1]) != (query.shape[2], key.shape[2]):
            if mask.keys[1] == 1:  # a step of a model whose first layer is recurrent: one mask for all keys
                return {"mask": mask.whole().expand(-1, -1, -1, key.shape[2])}
            raise ValueError(
                f"attention_mask is for {mask.queries[1]} queries and {mask.keys[1]} keys, and this layer has "
                f"{query.shape[2]} and {key.shape[2]}; call model.set_attn_implementation('eager')"
            )
        return mask.options(shares=shares)
    if mask is None:
        return {"causal": causal and query.shape[2] > 1}
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be a tensor [B, 1 or H, Lq, Lk] here, got {shape}; give the model [B, L]"
        )
    return {"mask": mask}


def _add(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    # transformers' own number: a query without a visible key gives a mean, not NaN
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _positions(mask: Any, query: Tensor, key: Tensor) -> Positions:
    if isinstance(mask, Mask) and (mask.queries[1], mask.keys[1]) == (query.shape[2], key.shape[2]):
        return mask.positions
    return Positions((key.shape[2] - query.shape[2], query.shape[2]), key.shape[2])


def prefers_original(
    module: nn.Module, queries: Any, keys: Any, device: Any, few: int | None = None, *, kind: str = "bias",
    dropout: float = 0.0, padded: bool = False,
) -> bool:  # fmt: skip
    """Whether the original is faster with its dense bias than an engine, on a CPU: up to `few` pairs, or by the rules for this
    kind of term."""
    if not is_free(module, device):
        return False
    if few is not None:
        return queries > 1 and queries * keys <= few
    drops = module.training and dropout > 0.0
    return rules.keeps_original(kind, queries, keys, torch.is_grad_enabled(), drops, padded)


def is_free(module: nn.Module, device: Any) -> bool:
    """Whether the rules for a CPU may choose: nothing is compiled, no engine is named, no ranks share the sequence."""
    own = module.__dict__
    return (
        not torch.compiler.is_compiling() and device is not None and device.type == "cpu"
        and own.get("posenc_engine", "auto") == "auto" and "posenc_context" not in own
    )  # fmt: skip


def _on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, causal: bool, scale: float | None, dropout: float,
    softcap: float | None,
) -> Tensor | None:  # fmt: skip
    """[B, H, L, D] by PyTorch's attention or the plain formula, with a dense bias if any; None: an engine is faster."""
    compact = type(mask) is Mask
    if compact and (mask.queries[1], mask.keys[1]) != (q.shape[2], k.shape[2]):
        return None
    if not compact and mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
        return None
    if mask is None and causal and q.shape[2] > 1 and (bias is not None or softcap is not None):
        return None
    if bias is None and softcap is None:
        found = mask.for_kernel(q.dtype) if compact else (mask, mask is None and causal and q.shape[2] > 1)
        if found is None:
            return None
        return _by_kernel(q, k, v, found[0], found[1], scale, dropout)
    if bias is not None:
        bias = bias if isinstance(bias, Tensor) else bias.dense()
        if bias.shape[-1] != k.shape[2]:
            return None
    learns = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    is_precise = q.dtype in PRECISE and (bias is None or bias.dtype == q.dtype)
    if softcap is None and not (is_precise and (learns or dropout)):
        return _by_kernel(q, k, v, mask.with_bias(bias) if compact else _add(mask, bias), False, scale, dropout)
    if compact:
        # the gradient of a part of the bias would be as large as the whole
        blocks, added = [(ALL, ALL)] if learns else mask.blocks(), mask.for_formula(q.dtype)
    else:
        is_bool = mask is not None and mask.dtype == torch.bool
        blocks, added = [(ALL, ALL)], _as_summand(mask, q.dtype, torch.finfo(q.dtype).min) if is_bool else mask
    done = [
        _by_formula(q[:, :, rows], k[:, :, keys], v[:, :, keys], _cut(bias, rows, keys), _cut(added, rows, keys), scale, softcap, dropout)
        for rows, keys in blocks
    ]  # fmt: skip
    return done[0] if len(done) == 1 else torch.cat(done, 2)


def _beside_sink(q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor, scale: float | None) -> Tensor | None:
    """[B, H, L, D] with the sink as one more key, whose value is zero: the queries have a channel more, sink / scale, which is 1 in
    that key and 0 in the others. So masks stay the same for all heads and layers, and the sinks learn through the queries."""
    if type(mask) is not Mask or (mask.queries[1], mask.keys[1]) != (q.shape[2], k.shape[2]) or q.dtype not in PRECISE:
        return None
    found = mask.for_kernel(q.dtype, has_sink=True)
    if found is None:
        return None
    scale = q.shape[3] ** -0.5 if scale is None else scale
    channel = (sinks.to(q.dtype) / scale).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    corner = nn.functional.pad(k.new_ones(1, 1, 1, 1), (k.shape[3], 0)).expand(*k.shape[:2], 1, -1)
    key = torch.cat((nn.functional.pad(k, (0, 1)), corner), 2)
    out = _by_kernel(
        torch.cat((q, channel), 3), key, nn.functional.pad(v, (0, 1, 0, 1)), found[0], found[1], scale, 0.0
    )
    return out[..., : v.shape[3]]


def _by_kernel(q, k, v, mask, causal, scale, dropout) -> Tensor:
    return scaled_dot_product_attention(
        q, k, v, mask, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _by_formula(q, k, v, bias, added, scale, softcap, dropout) -> Tensor:
    """PyTorch's attention without its copies: where a bias learns, and for dropout, its kernel takes neither on a CPU. Heads that
    share keys are rows of one matrix."""
    batch, heads, length, size = q.shape
    scale = size**-0.5 if scale is None else scale
    scale = scale if softcap is None else scale / softcap
    q = q if scale == 1.0 else q * scale
    s = (q.reshape(batch, k.shape[1], -1, size) @ k.transpose(2, 3)).view(batch, heads, length, -1)
    if softcap is not None:
        s = s.tanh_()
        s = s * softcap if added is None else torch.add(added, s, alpha=softcap)
        added = None
    for one in (bias, added):
        if one is not None:
            s += one
    p = s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype)
    p = nn.functional.dropout(p, dropout) if dropout else p
    return (p.view(batch, k.shape[1], -1, p.shape[3]) @ v).view(batch, heads, length, -1)


def _cut(x: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    if x is None or rows is ALL:
        return x
    return x[:, :, rows if x.shape[2] > 1 else ALL, keys]


def _as_summand(mask: Tensor, dtype: torch.dtype, lowest: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def _is_sdpa(options: dict[str, Any], query: Tensor, key: Tensor) -> bool:
    """Whether PyTorch's kernels take these masks without a dense one."""
    others = [name for name in options if name != "causal" and options[name] is not None]
    if not others:
        return not options.get("causal") or query.shape[2] == key.shape[2]
    return not options.get("causal") and others in (["key_mask"], ["mask"])


def _by_sdpa(module, query, key, value, options, scaling, dropout, kwargs):
    mask = options.get("mask")
    if mask is None and options.get("key_mask") is not None:
        mask = options["key_mask"][:, None, None, :]
    passed = kwargs if kwargs.get("cache") is not None else {}  # continuous batching: the function writes to it
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=options.get("causal", False), **passed
    )  # fmt: skip


def _by_scores(q, k, v, plan, options, dropout, softcap) -> tuple[Tensor, Tensor]:
    """The output and the probabilities, out of dense scores, which may be capped before the mask is added."""
    log_once("output_attentions or softcap: these calls compute dense scores")
    added = options.get("mask")
    added = None if added is None or added.dtype == torch.bool or softcap is None else options.pop("mask")
    dense = scores(q, k, plan, **options)
    if softcap is not None:
        dense = torch.where(dense == float("-inf"), dense, (dense / softcap).tanh() * softcap)
        dense = dense if added is None else dense + added
    weights = torch.nan_to_num(dense.softmax(-1)) if plan.sinks is None else _beside_sinks(dense, plan.sinks)
    weights = weights.to(q.dtype)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = nn.functional.dropout(weights, dropout) @ v
    return out.transpose(1, 2).contiguous(), weights


def _beside_sinks(dense: Tensor, sinks: Tensor) -> Tensor:
    sink = sinks.to(dense.dtype)[:, None, None].expand(*dense.shape[:3], 1)
    return torch.cat((dense, sink), dim=-1).softmax(-1)[..., :-1]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)
