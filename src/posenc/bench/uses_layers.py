"""Cells of one layer: posenc.Attention(512, 8) beside the layer written by hand, for every encoding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from .. import Attention, KVCache, Positions, explain
from .uses import OURS, Cell, Contest
from .uses_by_hand import BY_HAND, CAUSAL, Layer

D_MODEL, HEADS = 512, 8
SIZES = ((1, 16), (8, 64), (8, 128), (4, 256), (1, 512))
PAST = 256
"""Tokens before the one that is decoded."""
DECODED = 16
"""Tokens decoded in a round."""
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def cells(device: str, sizes=SIZES, encodings=tuple(BY_HAND), past: int = PAST, dtype=None) -> Iterator[Cell]:
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    for name in encodings:
        for batch, length in sizes:
            for training in (False, True):
                what = f"layer/{name}/{batch}x{length}/{'step' if training else 'forward'}"
                yield Cell(what, partial(whole_text, name, batch, length, training, device, dtype))
        yield Cell(f"layer/{name}/1 after {past}/token", partial(one_token, name, past, device, dtype))


def make_layer(name: str, causal: bool, device: str, dtype: torch.dtype, longest: int) -> Attention:
    import posenc

    torch.manual_seed(0)
    options = {"max_length": longest} if name == "learned" else {"std": 0.1} if name == "clipped" else {}
    if options:
        extra = posenc.encodings.registry.causal_options(name) if causal else {}
        encoding = posenc.create(name, d_model=D_MODEL, heads=HEADS, **options, **extra)
        return Attention(D_MODEL, HEADS, encoding=encoding, causal=causal).to(device, dtype)
    return Attention(D_MODEL, HEADS, encoding=name, causal=causal).to(device, dtype)


def compare(ours: list[Tensor], truth: list[Tensor], theirs: list[Tensor] | None = None) -> tuple[float, float]:
    """(error, allowed error) of the tensor that is closest to its limit: ALLOWED, or in low precision twice the error of the
    other contender."""
    worst = 0.0, 1.0
    for number, (own, true) in enumerate(zip(ours, truth, strict=True)):
        error, allowed = difference([own], [true]), ALLOWED[own.dtype]
        if theirs is not None:
            allowed = max(allowed, 2.0 * difference([theirs[number]], [true]))
        if not error / allowed <= worst[0] / worst[1]:
            worst = error, allowed
    return worst


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, relative in norm."""
    found = 0.0
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.double(), b.double()
        found = max(found, ((a - b).norm() / b.norm().clamp(min=1e-30)).item())
    return found


def whole_text(name: str, batch: int, length: int, training: bool, device: str, dtype: torch.dtype) -> Contest:
    layer = make_layer(name, name in CAUSAL, device, dtype, length).train(training)
    hands: dict[str, Layer] = {what: kind(layer, length, training) for what, kind in BY_HAND[name].items()}
    x = torch.randn(batch, length, D_MODEL, device=device, dtype=dtype, requires_grad=training)
    g = torch.randn_like(x)
    leaves = [x, *layer.parameters()]

    def forward(run):
        with torch.no_grad():
            return [run(x)]

    def step(run):
        out = run(x)
        return [out, *torch.autograd.grad(out, leaves, g)]

    call = step if training else forward

    def linear_maps(x: Tensor) -> Tensor:
        return layer.o_proj(layer.q_proj(x) + layer.k_proj(x) + layer.v_proj(x))

    def check() -> tuple[float, float]:
        if dtype == torch.float32:
            return max((compare(call(layer), call(hand)) for hand in hands.values()), key=lambda pair: pair[0])
        exact = copy.deepcopy(layer).float()
        kind = next(iter(BY_HAND[name].values()))
        wide = x.detach().float().requires_grad_(training)
        hand = kind(exact, length, training)
        with nullcontext() if training else torch.no_grad():
            out = hand(wide)
            truth = [out]
            if training:
                truth += torch.autograd.grad(out, [wide, *exact.parameters()], g.float())
        return compare(call(layer), truth, call(next(iter(hands.values()))))

    return Contest(
        partial(call, layer),
        {what: partial(call, hand) for what, hand in hands.items()},
        check,
        floor=partial(call, linear_maps) if name == "none" else None,
        engine=lambda: engine_of(layer, x, training),
    )


def engine_of(layer: Attention, x: Tensor, training: bool) -> str:
    with nullcontext() if training else torch.no_grad():
        q, k, v = (layer._heads(project(x)) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        plan = layer.encoding.plan(Positions(x.shape[1]), x=x, host=layer)
        return explain(q, k, v, plan, causal=layer.causal).engine


def one_token(name: str, past: int, device: str, dtype: torch.dtype) -> Contest:
    """One token after `past`, `DECODED` times in a round; the first token after the text is not timed, since storage grows."""
    longest = 2 * past
    layer = make_layer(name, True, device, dtype, longest).eval()
    hands = {what: kind(layer, longest, False) for what, kind in BY_HAND[name].items()}
    text = torch.randn(1, longest, D_MODEL, device=device, dtype=dtype)
    steps = [text[:, at : at + 1].contiguous() for at in range(past, longest)]
    state: dict[str, KVCache] = {}
    at: dict[str, int] = {}

    def start(who: str) -> None:
        with torch.no_grad():
            if who == OURS:
                state[who] = KVCache()
                layer(text[:, :past], cache=state[who])
            else:
                hands[who].start_cache(1)
                hands[who](text[:, :past], 0)
        at[who] = 0
        token(who)

    def token(who: str) -> Tensor:
        number = at[who]
        at[who] = number + 1
        with torch.no_grad():
            if who == OURS:
                return layer(steps[number], cache=state[who])
            return hands[who](steps[number], past + number)

    def check() -> tuple[float, float]:
        found = 0.0
        start(OURS)
        for who in hands:
            start(who)
        for _ in range(4):
            ours = token(OURS)
            found = max(found, *(difference([ours], [token(who)]) for who in hands))
        return found, ALLOWED[dtype]

    return Contest(
        partial(token, OURS),
        {who: partial(token, who) for who in hands},
        check,
        prepare={who: partial(start, who) for who in (OURS, *hands)},
        inner=DECODED,
    )
