"""Small plans that together use every slot, for engines to be tested with."""

import dataclasses

import torch

from posenc import Grid, Index, Lookup, Plan, Positions, index

SLOTS = ("bias", "dot_query", "states", "dot_key", "add_value", "slopes", "decay", "scale", "segments", "exact", "pair")


def tensors(batch=2, heads=4, kv_heads=2, lq=5, lk=7, size=8, v_size=None, dtype=torch.float64, device="cpu"):
    """Random q, k, v."""
    make = lambda h, l, d: torch.randn(batch, h, l, d, dtype=dtype, device=device)  # noqa: E731
    return make(heads, lq, size), make(kv_heads, lk, size), make(kv_heads, lk, v_size or size)


def plan_of(slots, q, k, v, positions=None, *, per_head=True, reach=(3, 2), dtype=None):
    """A plan with these slots filled with random numbers; every float tensor requires grad."""
    batch, heads, lq, size = q.shape
    lk, v_size = k.shape[2], v.shape[3]
    device, dtype = q.device, dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    make = lambda *shape: torch.randn(*shape, dtype=dtype, device=device).requires_grad_()  # noqa: E731
    positions = positions or Positions(q=(lk - lq, lq), k=lk)
    if "segments" in slots:
        segments = torch.randint(0, 3, (batch, lk), device=device)
        positions = Positions(positions.q, positions.k, more=[(segments[:, lk - lq :], segments)])
    h = heads if per_head else 1
    lookups = []
    if {"bias", "dot_query", "dot_key", "add_value", "states"} & set(slots):
        rows = tuple((i * 3) % 4 for i in range(reach[0] + reach[1] + 1))  # a bucketed index: rows repeat
        spot = Index(-reach[0], reach[1], rows, 4)
        lookups.append(
            Lookup(
                spot,
                bias=make(heads, 4) if "bias" in slots else None,
                dot_query=make(h, 4, size) if "dot_query" in slots else None,
                dot_key=make(h, 4, size) if "dot_key" in slots else None,
                add_value=make(h, 4, v_size) if "add_value" in slots else None,
            )
        )
        if "states" in slots:
            lookups.append(Lookup(index.clip(4, 1), dot_query=make(1, 6, 16), states=make(batch, heads, lq, 16)))
    if "exact" in slots:
        spot = index.exact(positions)
        lookups.append(Lookup(spot, bias=make(heads, spot.n), dot_query=make(heads, spot.n, size)))
    if "segments" in slots:
        spot = Index(-1, 1, rows=(1, 0, 1), n=2, axis=1)
        lookups.append(Lookup(spot, bias=make(heads, 2), dot_query=make(heads, 2, size)))
    weight = make(heads) if "pair" in slots else None
    return Plan(
        positions,
        lookups=tuple(lookups),
        slopes=make(heads) if "slopes" in slots else None,
        decay=(make(batch, heads, lq), make(batch, heads, lk)) if "decay" in slots else None,
        scale=make(batch, heads, lq) if "scale" in slots else None,
        pair=None if weight is None else Pair(weight),
    )


def mapped(plan, change):
    """The plan with every tensor x of a slot replaced by change(the slot's name, x)."""

    def of(name, x):
        return change(name, x) if isinstance(x, torch.Tensor) else x

    lookups = tuple(
        dataclasses.replace(one, **{name: change(name, x) for name, x in one.tensors()}) for one in plan.lookups
    )
    decay = None if plan.decay is None else tuple(of("decay", x) for x in plan.decay)
    return dataclasses.replace(
        plan, lookups=lookups, scale=of("scale", plan.scale), slopes=of("slopes", plan.slopes), decay=decay
    )


class Pair:
    """A pair function with a weight for each head times a positive function of both positions."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, p_q, p_k):
        product = (p_q[..., :, None].abs() + 1.0) / (p_k[..., None, :].abs() + 2.0)
        product = product.to(self.weight.dtype)
        return self.weight[:, None, None] * (product if product.dim() == 2 else product[:, None])


def grid_plan(heads=2, dtype=torch.float64):
    """Swin's table over a 2 x 3 window."""
    rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
    positions = Positions(torch.stack((rows.flatten(), columns.flatten()), -1)[None])
    grid = Grid((index.clip(1, 1, axis=0), index.clip(2, 2, axis=1)))
    return Plan(positions, lookups=(Lookup(grid, bias=torch.randn(heads, grid.n, dtype=dtype).requires_grad_()),))
