"""What a user writes. `test_types.py` has type checkers read this file, and runs it."""

from typing import assert_type

import torch
from torch import Tensor

import posenc
from posenc import Attention, Encoding, Index, KVCache, Mask, Plan, Positions, Rotation
from posenc.core.encoding import Host

# encodings: a literal name gives the class, any other string the base class
t5 = posenc.create("t5", heads=8, causal=True)
assert_type(t5, posenc.T5)
assert_type(t5.table, torch.nn.Parameter)
names = posenc.list_encodings()
assert_type(names, list[str])
assert_type(posenc.create(names[0], d_model=64, heads=8), Encoding)
assert_type(posenc.create("rope", head_dim=8), posenc.RoPE)
assert_type(posenc.info("rope").formula, str)
rope = posenc.RoPE(head_dim=8, layout="half", scaling=posenc.scaling.YaRN(factor=4.0, original=128))
assert_type(posenc.ALiBi(heads=8, learnable=True), posenc.ALiBi)
assert_type(posenc.NoPosition(), posenc.NoPosition)

# positions and plans
positions = Positions(q=(15, 1), k=16)
assert_type(positions.q_length, int)
assert_type(positions.distance(), Tensor)
plan = rope.plan(positions)
assert_type(plan, Plan)
assert_type(plan.rotate, Rotation | None)
assert_type(t5.index, Index)

# attention, functional
q, k, v = torch.randn(1, 8, 1, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
assert_type(posenc.attend(q, k, v, plan, causal=True, window=(8, None)), Tensor)
assert_type(posenc.scores(q, k, plan), Tensor)
assert_type(Mask(causal=True).limits, tuple[int | None, int | None])

# attention, as a layer
attention = Attention(64, 8, kv_heads=2, encoding="rope", causal=True)
cache = KVCache()
y = attention(torch.randn(1, 16, 64), cache=cache)
assert_type(y, Tensor)
assert_type(attention.encoding, Encoding)
assert_type(cache.length, int)
assert_type(cache.copy(), KVCache)


class Flat(Encoding):
    """An encoding of the user's own."""

    def terms(self, positions: Positions, *, x: Tensor | None = None, host: Host | None = None) -> Plan:
        return Plan(positions, slopes=torch.full((8,), 0.1))


assert_type(Attention(64, 8, encoding=Flat())(torch.randn(1, 4, 64)), Tensor)
