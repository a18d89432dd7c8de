"""Short texts under torch.compile on a GPU, forward: a bias by distance as a dense one of plain operations, for PyTorch's attention.

The compiler fuses them, makes once what all layers share, and calls PyTorch's kernels without a detour; the operator of a fused kernel,
which it cannot look into, costs the host more than the bias costs the device. Two layers of T5, 64 x 128 tokens on an H200: 0.84 of the
compiled original's time, 1.22 with the kernel. Terms with content (DeBERTa: 1.25, with the kernel 1.05) and training steps keep the kernel.

A number moves from its distance to its pair without an index:

    distances [Lq, n]    -1  0  1       with a column more, as rows of n       scores
    of query 0            a  b  c   |         a b c . a b c .                    b c
    of query 1            a  b  c   |           (b c .) (a b c)                  a b
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..core.torch_modes import is_exporting, transform_reason
from .lowering import Facts, LoweredPlan

SHORT = 1 << 14
"""The most pairs of a query and a key."""
MOST = 1 << 24
"""The most scores of all heads: of more, the device takes longer than the host."""


def applies(facts: Facts) -> bool:
    """Whether this is such a call: of known lengths, since a rule about symbolic ones would compile a graph for each side of it."""
    if not torch.compiler.is_compiling() or facts.device.type != "cuda" or facts.dtype.itemsize != 2 or is_exporting():
        return False
    if facts.gradient or facts.further_axes or facts.slopes or facts.decay or facts.pair or facts.scale == "tensor":
        return False
    if facts.positions != "run" or facts.has_content or facts.spans[0] is None:
        return False
    if (
        facts.documents
        or facts.has_dense_mask
        or facts.left is not None
        or facts.right not in (None, 0)
        or facts.return_lse
    ):
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # the compiler has loaded it

    pairs = facts.q_length * facts.k_length
    is_short = statically_known_true(pairs <= SHORT) and statically_known_true(
        facts.batch * facts.heads * pairs <= MOST
    )
    is_text = statically_known_true(facts.q_length > 1) and statically_known_true(facts.k_length > 0)
    return is_short and is_text and transform_reason() is None


def supports(lowered: LoweredPlan) -> bool:
    """Whether it `applies`, and no bias is rounded to the dtype of the queries: their sum would be."""
    biases = [lookup.bias.dtype for lookup in lowered.plan.lookups if lookup.bias is not None]
    return applies(lowered.facts) and biases == [lowered.facts.dtype]


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> Tensor:
    scale, mask, facts = lowered.scale, lowered.mask, lowered.facts
    assert isinstance(scale, float)
    bias, visible = make_bias(q.dtype, lowered), None
    if mask.causal:
        visible = mask.allowed(facts.q_length, facts.k_length, q.device)
    if mask.key_mask is not None:
        real = mask.key_mask[:, None, None, :]
        visible = real if visible is None else visible & real
    if visible is not None:  # not -inf: a fully masked query would have NaN
        bias = torch.where(visible, bias, torch.finfo(bias.dtype).min)
    bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
    grouped = facts.heads != facts.kv_heads
    out = scaled_dot_product_attention(q, k, v, bias, lowered.dropout, scale=scale, enable_gqa=grouped)
    return out if visible is None else torch.where(visible.any(-1, keepdim=True), out, 0.0)


def make_bias(dtype: torch.dtype, lowered: LoweredPlan) -> Tensor:
    """[1, H or 1, Lq, Lk]"""
    offset, queries, keys = lowered.plan.positions.offset, lowered.facts.q_length, lowered.facts.k_length
    assert offset is not None
    table = lowered.bias_table(offset - queries + 1, offset + keys - 1, torch.promote_types(dtype, torch.float32))
    assert table is not None
    return _moved(table[None, :, None].expand(1, -1, queries, -1), keys).to(dtype)


def _moved(distances: Tensor, keys: int) -> Tensor:
    """distances [.., Lq, Lq + Lk - 1] -> [.., Lq, Lk]: (i, j) has (i, j - i + Lq - 1)."""
    queries, n = distances.shape[-2:]
    flat = pad(distances, (0, 1)).flatten(-2)[..., queries - 1 : queries - 1 + queries * n]
    return flat.unflatten(-1, (queries, n))[..., :keys]
