"""Tensors with any strides, and the check that an engine does not care."""

import torch

import posenc
from tests import budget

B, H, L, D = 2, 4, 33, 8
LAYOUTS = {
    "channels before length": lambda h: torch.randn(B, h, D, L).transpose(2, 3),
    "length before heads": lambda h: torch.randn(B, L, h, D).transpose(1, 2),
    "every other channel": lambda h: torch.randn(B, h, L, 2 * D)[..., ::2],
    "one row for the batch": lambda h: torch.randn(1, h, L, D).expand(B, h, L, D),
    "one position": lambda h: torch.randn(B, h, 1, D).expand(B, h, L, D),
    "a slice of packed projections": lambda h: torch.randn(B, h, L, 3 * D)[..., D : 2 * D],
}
ENCODINGS = {
    "t5": dict(heads=H),
    "shaw": dict(head_dim=D, max_distance=3, values=True),
    "deberta": dict(d_model=H * D, heads=H, max_distance=8),
}


def check(engine, name, which, layout, device="cpu"):
    """One of q, k, v (`which`) comes in this layout; raises UnsupportedPlan where the engine refuses."""
    encoding = posenc.create(name, **ENCODINGS[name]).to(device)
    given = [torch.randn(B, H, L, D).to(device) for _ in range(3)]
    like = LAYOUTS[layout](H)
    held = torch.randn(like.untyped_storage().nbytes() // 4).to(device)  # a copy to a device may not keep strides
    given[which] = held.as_strided(like.shape, like.stride(), like.storage_offset())
    leaves = [x.detach().requires_grad_() for x in given]
    plan = encoding.plan(posenc.Positions(L))
    out = posenc.attend(*leaves, plan, causal=True, engine=engine)
    g = torch.full((), 0.7, device=device).expand(out.shape)  # a sum's gradient is one number with strides of zero
    expected, allowed = budget.expect(*given, plan, g, causal=True)
    results = (out, *torch.autograd.grad(out, leaves, g))
    for result, ours in zip(("out", "q", "k", "v"), results, strict=True):
        budget.assert_within(ours, expected[result], allowed[result], result)
