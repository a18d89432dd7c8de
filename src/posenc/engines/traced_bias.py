"""Short texts under torch.compile on a GPU: all terms as one dense bias of plain operations, for PyTorch's attention.

The compiler fuses them, makes once what all layers share, and calls PyTorch's kernels without a detour; the operator of a fused kernel,
which it cannot look into, costs the host more than the bias costs the device. A row of products with the table has a number for each
distance; moved to its pair without an index, so that its gradient is moved back and not added number by number:

    products [Lq, n]     distance   -1  0  1       with a column more, as rows of n       scores
    of query 0                       a  b  c   |         a b c . d e f .                    b c
    of query 1                       d  e  f   |           (b c .) (d e f)                  d e
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..core.tables import add
from ..core.torch_modes import is_exporting, transform_reason
from .lowering import Facts, LoweredPlan

SHORT = {False: 1 << 14, True: 0}
"""The most pairs of a query and a key, without and with gradients: biases by distance alone."""
SHORT_CONTENT = {False: 1 << 14, True: 1 << 14}
"""The same of terms with content."""
MOST = 1 << 24
"""The most scores of all heads: of more, the device takes longer than the host."""


def applies(facts: Facts) -> bool:
    """Whether this is such a call: of known lengths, since a rule about symbolic ones would compile a graph for each side of it."""
    if not torch.compiler.is_compiling() or facts.device.type != "cuda" or facts.dtype.itemsize != 2 or is_exporting():
        return False
    bias, _, key, value = facts.spans
    if value is not None or facts.further_axes or facts.slopes or facts.decay or facts.pair or facts.scale == "tensor":
        return False
    if facts.positions != "run" or facts.has_content == (bias is not None):
        return False
    if key is not None and facts.heads != facts.kv_heads:
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

    most = (SHORT_CONTENT if facts.has_content else SHORT)[facts.gradient]
    pairs = facts.q_length * facts.k_length
    is_short = statically_known_true(pairs <= most) and statically_known_true(facts.batch * facts.heads * pairs <= MOST)
    is_text = statically_known_true(facts.q_length > 1) and statically_known_true(facts.k_length > 0)
    return is_short and is_text and transform_reason() is None


def supports(lowered: LoweredPlan) -> bool:
    """Whether it `applies`, and no bias is rounded to the dtype of the queries: their sum would be."""
    biases = [lookup.bias.dtype for lookup in lowered.plan.lookups if lookup.bias is not None]
    return applies(lowered.facts) and biases in ([], [lowered.facts.dtype])


def run(q: Tensor, k: Tensor, v: Tensor, lowered: LoweredPlan) -> Tensor:
    scale, mask, facts = lowered.scale, lowered.mask, lowered.facts
    assert isinstance(scale, float)
    bias, visible = make_bias(q, k, lowered), None
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


def make_bias(q: Tensor, k: Tensor, lowered: LoweredPlan) -> Tensor:
    """All terms, [B or 1, H, Lq, Lk] in q's dtype, summed in float32 or better."""
    offset, facts, scale = lowered.plan.positions.offset, lowered.facts, lowered.scale
    assert offset is not None
    queries, keys, precision = facts.q_length, facts.k_length, torch.promote_types(q.dtype, torch.float32)
    lo, hi = offset - queries + 1, offset + keys - 1
    total: Tensor | None = None
    table, states = lowered.query_table(q, lo, hi, q.dtype)
    if table is not None:
        total = _moved((q if states is None else states) @ table.mT, keys).to(precision)
    table = lowered.key_table(lo, hi, k.dtype)
    if table is not None:
        total = add(total, _moved(k @ table.flip(1).mT, queries).mT.to(precision))
    total = None if total is None else total * scale
    table = lowered.bias_table(lo, hi, precision)
    if table is not None:
        total = add(total, _moved(table[None, :, None].expand(1, -1, queries, -1), keys))
    assert total is not None
    return total.to(q.dtype)


def _moved(products: Tensor, keys: int) -> Tensor:
    """products [.., Lq, Lq + Lk - 1] -> [.., Lq, Lk]: (i, j) has (i, j - i + Lq - 1)."""
    queries, n = products.shape[-2:]
    flat = pad(products, (0, 1)).flatten(-2)[..., queries - 1 : queries - 1 + queries * n]
    return flat.unflatten(-1, (queries, n))[..., :keys]
