"""Cells of one `attend` call: host time, one layer's attention, one query over a cache, windows of pictures.

Encodings are those of `uses_by_hand`, whose layers do the dense computation here too: a plan is made in every call, as a layer does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import Attention, Grid, Lookup, Plan, Positions, attend, create, explain, index
from ..encodings.registry import causal_options
from .uses import PASSES, Cell, Contest
from .uses_by_hand import BY_HAND, Layer
from .uses_layers import compare, low_precision

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HOST_GOALS = {False: 60.0, True: 250.0}
"""Microseconds above PyTorch's own attention, forward and training step."""
PER_HEAD = ("none", "rope", "alibi", "t5", "clipped", "shaw", "deberta", "transformer_xl")
"""Encodings of cells without a layer: what enters in queries, keys and scores."""


def cells(device: str) -> Iterator[Cell]:
    for name, (what, training) in product(PER_HEAD, PASSES.items()):
        make = partial(one_call, name, 16, 12, 128, 64, training, device)
        yield Cell(f"host/{name}/16x12x128x64/{what}", make, "host", HOST_GOALS[training])
    for name, (what, training) in product(PER_HEAD, PASSES.items()):
        make = partial(one_call, name, 32, 12, 512, 64, training, device, "cudnn")
        yield Cell(f"call/{name}/32x12x512x64/{what}", make, "graph")
    for name in ("none", "rope", "t5"):
        make = partial(one_call, name, 4, 16, 4096, 64, True, device, "cudnn")
        yield Cell(f"call/{name}/4x16x4096x64/step", make, "graph")
    caches, names = ((1, 1024), (16, 4096), (64, 8192)), ("none", "rope", "alibi", "t5", "clipped", "shaw")
    for (batch, keys), name in product(caches, names):
        make = partial(one_query, name, batch, 32, 8, keys, 128, device)
        yield Cell(f"decode/{name}/{batch}x{keys}/python", make)
        yield Cell(f"decode/{name}/{batch}x{keys}/graph", make, "graph")
    grids = (4096, 7, 4), (1024, 16, 16), (512, 24, 8)
    for (count, side, heads), (what, training) in product(grids, PASSES.items()):
        make = partial(windows, count, side, heads, 32, training, device)
        yield Cell(f"windows/{count} of {side}x{side}/H{heads}/{what}", make)


def make_encoding(name: str, heads: int, size: int, device: str, dtype: torch.dtype, causal: bool = False):
    torch.manual_seed(0)
    options = causal_options(name) if causal else {}
    options |= {"std": 0.1} if name == "clipped" else {}
    return create(name, d_model=heads * size, heads=heads, head_dim=size, **options).to(device, dtype)


def heads_of(*shape: int, device: str, training: bool) -> list[Tensor]:
    """Random q, k and v."""
    like = {"device": device, "dtype": low_precision(device)}
    return [torch.randn(*shape, **like).requires_grad_(training) for _ in range(3)]  # type: ignore[call-overload]


def plain_calls(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's attention by each of its kernels that takes the call."""
    grouped = q.shape[1] != k.shape[1]

    def default():
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def by(backend):
        with sdpa_kernel(backend):
            return default()

    calls: dict[str, Callable[[], Tensor]] = {"sdpa": default}
    for name, backend in BACKENDS.items() if q.is_cuda else ():
        call = partial(by, backend)
        try:
            with torch.no_grad():
                call()
        except RuntimeError:
            continue
        calls[name] = call
    return calls


def timed_pass(call: Callable[[], Tensor], leaves: list[Tensor], g: Tensor | None) -> Callable[[], list[Tensor]]:
    """A forward pass without gradients, or a training step."""

    def forward():
        with torch.no_grad():
            return [call()]

    def step():
        out = call()
        return [out, *torch.autograd.grad(out, leaves, g)]

    return forward if g is None else step


# ---- one call ------------------------------------------------------------------------------------------------------
def one_call(
    name: str, batch: int, heads: int, length: int, size: int, training: bool, device: str, floor: str = "sdpa"
) -> Contest:
    q, k, v = heads_of(batch, heads, length, size, device=device, training=training)
    g, dtype = torch.randn_like(q) if training else None, q.dtype
    causal = name in ("none", "rope", "alibi")
    encoding = make_encoding(name, heads, size, device, dtype)
    layer = Attention(heads * size, heads, encoding=encoding, causal=causal).to(device, dtype)
    leaves = [q, k, v, *encoding.parameters()]

    def plan() -> Plan:
        return encoding.plan(Positions(length), host=layer)

    def ours() -> Tensor:
        return attend(q, k, v, plan(), causal=causal)

    plain = plain_calls(q, k, v, causal)
    fastest = {what: timed_pass(call, [q, k, v], g) for what, call in plain.items()}
    if name == "none":
        others = fastest
    else:
        hands = {what: kind(layer, length, training) for what, kind in BY_HAND[name].items()}
        others = {
            what if backend == "sdpa" else f"{what} ({backend})": timed_pass(partial(dense_call, hand, q, k, v, backend), leaves, g)
            for what, hand in hands.items()
            for backend in (plain if name == "rope" else ("sdpa",))
        }  # fmt: skip
    call = timed_pass(ours, leaves, g)

    def check() -> tuple[float, float]:
        """On a few texts, with the dense computation in float32 for the truth."""
        kind, some = next(iter(BY_HAND[name].values())), None if g is None else g[:2]

        def by_hand(layer: Attention, few: list[Tensor]) -> list[Tensor]:
            call = partial(dense_call, kind(layer, length, training), few[0], few[1], few[2], "sdpa")
            return timed_pass(
                call, [*few, *layer.encoding.parameters()], None if some is None else some.to(few[0].dtype)
            )()

        low = [x[:2].detach().requires_grad_(training) for x in (q, k, v)]
        wide = [x.detach().float().requires_grad_(training) for x in low]
        truth, theirs = by_hand(copy.deepcopy(layer).float(), wide), by_hand(layer, low)
        own = timed_pass(
            lambda: attend(low[0], low[1], low[2], plan(), causal=causal), [*low, *encoding.parameters()], some
        )
        return compare(own(), truth, theirs)

    return Contest(
        call, others, check,
        floor=fastest.get(floor, fastest["sdpa"]), engine=lambda: explain(q, k, v, plan(), causal=causal).engine,
    )  # fmt: skip


def dense_call(hand: Layer, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    q, k = hand.rotate(q, k, 0)
    with nullcontext() if backend == "sdpa" else sdpa_kernel(BACKENDS[backend]):
        return hand.attend(q, k, v, q, 0)


# ---- one query -----------------------------------------------------------------------------------------------------
def one_query(name: str, batch: int, heads: int, kv_heads: int, keys: int, size: int, device: str) -> Contest:
    """One query over a cache whose keys are rotated already."""
    dtype = low_precision(device)
    torch.manual_seed(1)
    q = torch.randn(batch, heads, 1, size, device=device, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, keys, size, device=device, dtype=dtype) for _ in range(2))
    encoding = make_encoding(name, heads, size, device, dtype, causal=True)
    positions, own = Positions((keys - 1, 1), keys), Positions((keys - 1, 1))
    rotation = encoding.rotation(own)  # made once for all layers, as the angles by hand below
    rotation = None if rotation is None else replace(rotation, k=None)

    def plan() -> Plan:
        terms = encoding.terms(positions)
        return terms if rotation is None else terms.with_rotation(rotation)

    def ours() -> list[Tensor]:
        with torch.no_grad():
            return [attend(q, k, v, plan(), causal=True)]

    # what is made once: angles of the position, the bias of all distances, the row of each distance
    distances = torch.arange(1 - keys, 1, device=device)
    scale = getattr(encoding, "scale", None)
    bias = rows = angles = None
    with torch.no_grad():
        if name == "alibi":
            bias = -torch.tensor(encoding.start, device=device)[:, None] * distances.abs()
        elif name in ("t5", "clipped"):
            table = encoding.table.t() if name == "t5" else encoding.table
            bias = table[:, encoding.index.lookup(distances)].float()
        elif name == "shaw":
            rows = encoding.index.lookup(distances)
        elif name == "rope":
            angles = [torch.cat((a, a), -1)[0].to(dtype) for a in encoding.rotation(own).q]

    def prepared() -> tuple[Tensor, Tensor | None]:
        """The query, rotated, and the mask [B or 1, H, 1, Lk]."""
        if angles is not None:
            a, b = q.chunk(2, -1)
            return q * angles[0] + torch.cat((-b, a), -1) * angles[1], None
        if rows is not None:
            products = (q @ encoding.keys[0].t()) * size**-0.5
            return q, products[..., rows]
        return q, None if bias is None else bias.to(dtype)[None, :, None]

    def grouped() -> list[Tensor]:
        with torch.no_grad():
            query, mask = prepared()
            return [F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale, enable_gqa=True)]

    def folded() -> list[Tensor]:
        """Heads that share keys as queries of one head."""
        with torch.no_grad():
            query, mask = prepared()
            group = heads // kv_heads
            query = query.view(batch, kv_heads, group, size)
            if mask is not None:
                mask = mask.reshape(mask.shape[0], kv_heads, group, keys).expand(batch, -1, -1, -1)
            out = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
            return [out.view(batch, heads, 1, size)]

    def floor() -> list[Tensor]:
        with torch.no_grad():
            return [F.scaled_dot_product_attention(q, k, v, enable_gqa=True)]

    def check() -> tuple[float, float]:
        """The truth in float32, of one text."""
        with torch.no_grad():
            query, mask = prepared()
            wide_k, wide_v = (x[:1].float().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = query[:1].float() @ wide_k.mT * (size**-0.5 if scale is None else scale)
            truth = (scores if mask is None else scores + mask[:1].float()).softmax(-1) @ wide_v
        return compare([ours()[0][:1]], [truth], [folded()[0][:1]])

    return Contest(
        ours, {"sdpa, grouped": grouped, "sdpa, heads as queries": folded}, check, floor=floor, engine=lambda: explain(q, k, v, plan(), causal=True).engine,
    )  # fmt: skip


# ---- windows -------------------------------------------------------------------------------------------------------
def windows(count: int, side: int, heads: int, size: int, training: bool, device: str) -> Contest:
    """Swin's windows: a table over the grid of row and column distances."""
    dtype, length = low_precision(device), side * side
    torch.manual_seed(2)
    q, k, v = heads_of(count, heads, length, size, device=device, training=training)
    g = torch.randn_like(q) if training else None
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    coordinates = torch.stack((rows.flatten(), columns.flatten()), -1).to(device)
    reach = (1 - side, side - 1)
    positions = Positions(
        coordinates[:, 0], coordinates[:, 0], more=[(coordinates[:, 1], coordinates[:, 1], reach)], reach=reach
    )
    grid = Grid((index.clip(side - 1, side - 1, axis=0), index.clip(side - 1, side - 1, axis=1)))
    table = (torch.randn(heads, grid.n, device=device, dtype=dtype) / 4).requires_grad_(training)
    steps = coordinates[None, :] - coordinates[:, None] + side - 1
    number = steps[..., 0] * (2 * side - 1) + steps[..., 1]
    leaves = [q, k, v, table]
    with torch.no_grad():
        kept = table[:, number.flatten()].view(1, heads, length, length)

    def plan() -> Plan:
        return Plan(positions, lookups=(Lookup(grid, bias=table),))

    def ours() -> Tensor:
        return attend(q, k, v, plan())

    def check() -> tuple[float, float]:
        """Of a few windows, with the dense computation in float32 for the truth."""
        some = None if g is None else g[:64]
        low: Any = [x[:64].detach().requires_grad_(training) for x in (q, k, v)]

        def dense_of(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Callable[[], Tensor]:
            return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=table[:, number][None])

        wide: Any = [x.detach().float().requires_grad_(training) for x in (*low, table)]
        truth = timed_pass(dense_of(*wide), wide, None if some is None else some.float())()
        theirs = timed_pass(dense_of(low[0], low[1], low[2], table), [*low, table], some)()
        own = timed_pass(lambda: attend(low[0], low[1], low[2], plan()), [*low, table], some)()
        return compare(own, truth, theirs)

    def dense() -> Tensor:
        """As in Swin: table[index], made once where nothing is trained."""
        bias = kept
        if training:
            bias = table.t()[number.flatten()].view(length, length, heads).permute(2, 0, 1).contiguous()[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def by_embedding() -> Tensor:
        bias = F.embedding(number, table.t()).permute(2, 0, 1).contiguous()[None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    call, others = timed_pass(ours, leaves, g), {"dense bias + sdpa": timed_pass(dense, leaves, g)}
    if training:
        others["bias by embedding + sdpa"] = timed_pass(by_embedding, leaves, g)
    return Contest(call, others, check, engine=lambda: explain(q, k, v, plan()).engine)
