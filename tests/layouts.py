"""Tensors with any strides, and the check that an engine does not care."""

import torch

import posenc

B, H, L, D = 2, 4, 33, 8
LAYOUTS = {
    "channels before length": lambda h: torch.randn(B, h, D, L).transpose(2, 3),
    "length before heads": lambda h: torch.randn(B, L, h, D).transpose(1, 2),
    "every other channel": lambda h: torch.randn(B, h, L, 2 * D)[..., ::2],
    "one row for the batch": lambda h: torch.randn(1, h, L, D).expand(B, h, L, D),
    "one position": lambda h: torch.randn(B, h, 1, D).expand(B, h, L, D),
    "a slice of packed projections": lambda h: torch.randn(B, h, L, 3 * D)[..., D : 2 * D],
}
SCHEMES = {
    "t5": dict(heads=H),
    "shaw": dict(head_dim=D, k=3, values=True),
    "deberta": dict(d_model=H * D, heads=H, max_distance=8),
}


def run(q, k, v, scheme, engine):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = posenc.attend(q, k, v, scheme.plan(posenc.Where(L)), causal=True, engine=engine)
    # a sum's gradient is one number with strides of zero, as it often is
    return out, torch.autograd.grad(out.sum() + (out**2).sum(), (q, k, v))


def check(engine, name, which, layout, device="cpu"):
    """One of q, k, v (`which`) comes in this layout; raises UnsupportedPlan where the engine refuses."""
    scheme = posenc.create(name, **SCHEMES[name]).to(device)
    given = [torch.randn(B, H, L, D).to(device) for _ in range(3)]
    like = LAYOUTS[layout](H)
    held = torch.randn(like.untyped_storage().nbytes() // 4).to(device)  # a copy to a device may not keep strides
    given[which] = held.as_strided(like.shape, like.stride(), like.storage_offset())
    out, gradients = run(*given, scheme, engine)
    expected, wanted = run(*(x.contiguous() for x in given), scheme, "reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    for ours, theirs in zip(gradients, wanted):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
