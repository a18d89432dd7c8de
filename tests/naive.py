"""The plan's formula as plain loops over pairs, in float64: the definition that the reference engine is tested with."""

import math

import torch


def at(positions, batch, slot):
    """One position of [L], [1, L] or [B, L]."""
    return int(positions[slot] if positions.dim() == 1 else positions[batch % positions.shape[0], slot])


def rows_of(index, positions, batch, i, j):
    """Table row of one pair, by scalars."""
    parts = index.parts if hasattr(index, "parts") else (index,)
    row = 0
    for part in parts:
        q, k = positions.q_positions(axis=part.axis), positions.k_positions(axis=part.axis)
        step = min(max(at(k, batch, j) - at(q, batch, i), part.lo), part.hi) - part.lo
        row = row * part.n + (step if part.rows is None else part.rows[step])
    return row


def attend(q, k, v, plan, allowed=None, added=None):
    """Output [B, H, Lq, Dv]; q and k are shifted and rotated already; allowed, added are [B, H, Lq, Lk] or None."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, lq, size = q.shape
    lk = k.shape[2]
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, lq, v.shape[3], dtype=torch.float64)
    scale = plan.scale_of(size)
    if isinstance(scale, torch.Tensor):
        scale = scale.double().expand(batch, heads, lq, 1)
    pair = None
    if plan.pair is not None:
        pair = (
            plan.pair(plan.positions.q_positions(), plan.positions.k_positions()).double().expand(batch, heads, lq, lk)
        )

    def of(table, h):
        return table[h if table.shape[0] > 1 else 0].double()

    for b in range(batch):
        for h in range(heads):
            for i in range(lq):
                logits, values = [], []
                for j in range(lk):
                    key, value = k[b, h // group, j], v[b, h // group, j].clone()
                    dots, rest = q[b, h, i] @ key, 0.0
                    for lookup in plan.lookups:
                        row = rows_of(lookup.index, plan.positions, b, i, j)
                        if lookup.dot_query is not None:
                            state = q[b, h, i] if lookup.states is None else lookup.states[b, h, i].double()
                            if lookup.query_shift is not None:
                                state = state + of(lookup.query_shift, h)
                            dots = dots + state @ of(lookup.dot_query, h)[row]
                        if lookup.dot_key is not None:
                            dots = dots + key @ of(lookup.dot_key, h)[row]
                        if lookup.bias is not None:
                            rest = rest + of(lookup.bias, h)[row]
                        if lookup.add_value is not None:
                            value = value + of(lookup.add_value, h)[row]
                    if plan.slopes is not None:
                        r = at(plan.positions.k_positions(), b, j) - at(plan.positions.q_positions(), b, i)
                        rest = rest - plan.slopes[h].double() * abs(r)
                    if plan.decay is not None:
                        rest = rest + plan.decay[0][b, h, i].double() - plan.decay[1][b, h, j].double()
                    if pair is not None:
                        rest = rest + pair[b, h, i, j]
                    if added is not None:
                        rest = rest + added[b, h, i, j].double()
                    factor = scale[b, h, i, 0] if isinstance(scale, torch.Tensor) else scale
                    seen = allowed is None or bool(allowed[b, h, i, j])
                    logits.append(factor * dots + rest if seen else torch.tensor(-math.inf, dtype=torch.float64))
                    values.append(value)
                if not logits:
                    continue
                row = torch.stack(logits)
                if torch.isneginf(row).all():
                    continue
                out[b, h, i] = torch.softmax(row, 0) @ torch.stack(values)
    return out
