"""Cells of one layer: posenc.Attention(512, 8) beside the layer written by hand, for every encoding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .. import Attention, Encoding, KVCache, Positions, create, explain
from ..encodings.registry import causal_options
from .uses import OURS, PASSES, Cell, Contest
from .uses_by_hand import BY_HAND, CAUSAL, Layer

D_MODEL, HEADS = 512, 8
SIZES = ((1, 16), (8, 64), (8, 128), (4, 256), (1, 512))
PAST = 256
"""Tokens before the one that is decoded."""
LONG_PAST = 2048
DECODED = 16
"""Tokens decoded in a round."""
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def low_precision(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def cells(device: str, sizes=SIZES, encodings=tuple(BY_HAND)) -> Iterator[Cell]:
    dtype = low_precision(device)
    for name in encodings:
        for (batch, length), (what, training) in product(sizes, PASSES.items()):
            make = partial(whole_text, name, batch, length, training, device, dtype)
            yield Cell(f"layer/{name}/{batch}x{length}/{what}", make)
        yield Cell(f"layer/{name}/1 after {PAST}/token", partial(one_token, name, PAST, device, dtype))
    if device == "cpu":
        for name in ("none", "rope", "alibi", "t5"):
            make = partial(one_token, name, LONG_PAST, device, dtype, longest=LONG_PAST + 2 * DECODED)
            yield Cell(f"layer/{name}/1 after {LONG_PAST}/token", make)


PADDED = ("none", "learned", "rope", "alibi", "t5", "shaw")
OTHER_USES: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "packed": (("rope", "t5"), ((8, 128), (1, 512))),
    "window": (("rope", "t5"), ((8, 128), (1, 512))),
    "grouped": (("rope", "t5"), ((1, 16), (8, 128), (1, 512))),
}
"""By use: encodings and sizes."""
ON_CPU: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "grouped, padded": (("rope", "t5"), ((1, 16), (8, 128))),
    "context, padded": (("none",), ((1, 16), (8, 64), (8, 128))),
    "dropout": (("rope", "t5"), ((1, 16), (8, 128), (4, 256), (1, 512))),
    "autocast": (("rope", "t5"), ((1, 16), (8, 128))),
    "mask": (("rope", "t5"), ((8, 128), (1, 512))),
}
"""The same, on a CPU. context: cross-attention over another text of the same length; mask: a boolean one of all pairs."""
ON_GPU: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "mask": (("rope", "t5"), ((8, 128), (1, 512), (4, 2048)))
}
LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (64, 0)}, "grouped": {"kv_heads": 2}, "grouped, padded": {"kv_heads": 2}, "dropout": {"dropout": 0.1},
}  # fmt: skip


def masked_cells(device: str) -> Iterator[Cell]:
    """Padding, packed documents, windows, grouped queries; a batch of texts that continue, padded on the left; a few tokens at once. On a
    CPU also cross-attention, dropout, autocast."""
    dtype = low_precision(device)
    further = ON_CPU if device == "cpu" else ON_GPU
    for use, (encodings, lengths) in {"padded": (PADDED, SIZES), **OTHER_USES, **further}.items():
        for name, (batch, length), (what, training) in product(encodings, lengths, PASSES.items()):
            if training or use != "dropout":
                make = partial(whole_text, name, batch, length, training, device, dtype, use)
                yield Cell(f"masked/{name}, {use}/{batch}x{length}/{what}", make)
    for name in ("none", "rope", "alibi", "t5"):
        padded = partial(one_token, name, PAST, device, dtype, 8, 1, True)
        yield Cell(f"masked/{name}, padded/8 after {PAST}/token", padded)
        yield Cell(f"masked/{name}, 4 tokens/1 after {PAST}/token", partial(one_token, name, PAST, device, dtype, 1, 4))


def token_masks(use: str, batch: int, length: int, device: str) -> dict[str, Any]:
    """What the layer is given besides x: half to all of each text is real; three documents in each row; or three quarters of all pairs."""
    at = torch.arange(length, device=device)
    if use.endswith("padded"):
        ends = length - torch.arange(batch, device=device) * (length // 2) // max(1, batch - 1)
        return {"key_mask": at < ends[:, None] if batch > 1 else at[None] < length - length // 4}
    if use == "mask":
        return {"mask": (torch.rand(length, length, device=device) < 0.75) | (at == at[:, None])}
    return {"documents": (at * 3 // length).expand(batch, length).contiguous()} if use == "packed" else {}


def make_layer(name: str, causal: bool, device: str, dtype: torch.dtype, longest: int, **layer_options) -> Attention:
    torch.manual_seed(0)
    options = {"max_length": longest} if name == "learned" else {"std": 0.1} if name == "clipped" else {}
    encoding: str | Encoding = name
    if options:
        extra = causal_options(name) if causal else {}
        encoding = create(name, d_model=D_MODEL, heads=HEADS, **options, **extra)
    return Attention(D_MODEL, HEADS, encoding=encoding, causal=causal, **layer_options).to(device, dtype)


def compare(ours: list[Tensor], truth: list[Tensor], theirs: list[Tensor] | None = None) -> tuple[float, float]:
    """(error, allowed error) of the tensor that is closest to its limit: ALLOWED, or in low precision twice the error of the
    other contender."""
    worst = 0.0, 1.0
    for number, (own, true) in enumerate(zip(ours, truth, strict=True)):
        error, allowed = difference(own, true), ALLOWED[own.dtype]
        if theirs is not None:
            allowed = max(allowed, 2.0 * difference(theirs[number], true))
        if not error / allowed <= worst[0] / worst[1]:
            worst = error, allowed
    return worst


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative in norm."""
    a, b = ours.double(), theirs.double()
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


def whole_text(
    name: str, batch: int, length: int, training: bool, device: str, dtype: torch.dtype, use: str = ""
) -> Contest:
    causal = (name in CAUSAL and not use.startswith("context")) or use == "window"
    layer = make_layer(name, causal, device, dtype, length, **LAYER_OPTIONS.get(use, {})).train(training)
    masks = token_masks(use, batch, length, device)
    hands: dict[str, Layer] = {what: kind(layer, length, training) for what, kind in BY_HAND[name].items()}
    x = torch.randn(batch, length, D_MODEL, device=device, dtype=dtype, requires_grad=training)
    g = torch.randn_like(x)
    leaves = [x, *layer.parameters()]
    if use.startswith("context"):
        masks["context"] = torch.randn_like(x)
    elif "key_mask" in masks:  # outputs of padding have no loss
        g = g * masks["key_mask"][..., None]
    is_rounded = use == "autocast"
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=is_rounded)

    def forward(run):
        with torch.no_grad(), autocast() if is_rounded else nullcontext():
            return [run(x, **masks)]

    def step(run):
        with autocast() if is_rounded else nullcontext():
            out = run(x, **masks)
        return [out, *torch.autograd.grad(out, leaves, g.to(out.dtype))]

    call = step if training else forward

    def linear_maps(x: Tensor) -> Tensor:
        return layer.o_proj(layer.q_proj(x) + layer.k_proj(x) + layer.v_proj(x))

    def results(run) -> list[Tensor]:
        out, *grads = call(run)
        hidden = "key_mask" in masks and "context" not in masks
        return [out[masks["key_mask"]] if hidden else out, *grads]

    def check() -> tuple[float, float]:
        if is_rounded:
            pairs = [pair for hand in hands.values() for pair in zip(results(layer), results(hand), strict=True)]
            return max(difference(own, other) for own, other in pairs), ALLOWED[torch.bfloat16]
        if dtype == torch.float32:
            layer.train(training and use != "dropout")  # what is dropped is drawn
            found = max((compare(results(layer), results(hand)) for hand in hands.values()), key=lambda pair: pair[0])
            layer.train(training)
            return found
        exact = copy.deepcopy(layer).float()
        kind = next(iter(BY_HAND[name].values()))
        wide = x.detach().float().requires_grad_(training)
        hand = kind(exact, length, training)
        with nullcontext() if training else torch.no_grad():
            out = hand(wide, **masks)
            truth = [out[masks["key_mask"]] if "key_mask" in masks else out]
            if training:
                truth += torch.autograd.grad(out, [wide, *exact.parameters()], g.float())
        return compare(results(layer), truth, results(next(iter(hands.values()))))

    return Contest(
        partial(call, layer),
        {what: partial(call, hand) for what, hand in hands.items()},
        check,
        floor=partial(call, linear_maps) if name == "none" and not use else None,
        engine=None if device == "cpu" and use in ON_CPU else lambda: engine_of(layer, x, training, masks),
    )


def engine_of(layer: Attention, x: Tensor, training: bool, masks: dict[str, Any]) -> str:
    with nullcontext() if training else torch.no_grad():
        q, k, v = (layer._heads(project(x)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        plan = layer.encoding.plan(Positions(x.shape[1]), x=x, host=layer)
        return explain(q, k, v, plan, causal=layer.causal, window=layer.window, **masks).engine


def one_token(
    name: str, past: int, device: str, dtype: torch.dtype, batch: int = 1, count: int = 1, padded: bool = False,
    longest: int | None = None,
) -> Contest:  # fmt: skip
    """`count` tokens after `past`, `DECODED` times in a round; the first ones after the text are not timed, since storage grows. padded:
    on the left, by up to half of the past."""
    longest = longest or 2 * past
    layer = make_layer(name, True, device, dtype, longest).eval()
    hands = {what: kind(layer, longest, False) for what, kind in BY_HAND[name].items()}
    text = torch.randn(batch, longest, D_MODEL, device=device, dtype=dtype)
    steps = [text[:, at : at + count].contiguous() for at in range(past, longest, count)]
    begins = torch.arange(batch, device=device)[:, None] * (past // 2) // batch
    real = torch.arange(longest, device=device) >= begins if padded else None
    state: dict[str, KVCache] = {}
    at: dict[str, int] = {}

    def start(who: str) -> None:
        with torch.no_grad():
            if who == OURS:
                state[who] = KVCache()
                layer(text[:, :past], cache=state[who], key_mask=None if real is None else real[:, :past])
            else:
                hands[who].start_cache(batch)
                hands[who](text[:, :past], 0, None if real is None else real[:, :past])
        at[who] = 0
        token(who)

    def token(who: str) -> Tensor:
        number = at[who]
        at[who] = number + 1
        with torch.no_grad():
            if who == OURS:
                return layer(steps[number], cache=state[who])
            at_slot = past + number * count
            return hands[who](steps[number], at_slot, None if real is None else real[:, : at_slot + count])

    def check() -> tuple[float, float]:
        found = 0.0
        start(OURS)
        for who in hands:
            start(who)
        for _ in range(4):
            ours = token(OURS)
            found = max(found, *(difference(ours, token(who)) for who in hands))
        return found, ALLOWED[dtype]

    return Contest(
        partial(token, OURS),
        {who: partial(token, who) for who in hands},
        check,
        prepare={who: partial(start, who) for who in (OURS, *hands)},
        inner=DECODED,
    )
