"""Bytes that a rank sends and holds, counted."""

import torch
from torch.profiler import ProfilerActivity, profile

import posenc
from posenc import parallel

BATCH, HEADS, KV_HEADS, SIZE = 1, 8, 8, 16


def peak_bytes(function):
    """The most memory that PyTorch's CPU allocator held while a function ran, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def count(group, strategy, balance, local, encoding, options):
    """(bytes sent forward, bytes sent backward, peak bytes) of one call with `local` tokens on each rank."""
    cp = parallel.ContextParallel(group, strategy=strategy, balance=balance, timeout=120.0)
    torch.manual_seed(0)
    size, kv_heads = options.get("head_dim", SIZE), options.get("kv_heads", KV_HEADS)
    module = posenc.create(encoding, d_model=HEADS * size, heads=HEADS, head_dim=size)
    q = torch.randn(BATCH, HEADS, local, size, requires_grad=True)
    k, v = (torch.randn(BATCH, kv_heads, local, size, requires_grad=True) for _ in range(2))
    sent = []

    def step():
        sent.clear()
        with parallel.count_traffic() as forward:
            masks = {name: options[name] for name in ("causal", "window") if name in options}
            out = parallel.attend(q, k, v, module, context_parallel=cp, **masks)
        with parallel.count_traffic() as backward:
            out.backward(torch.ones_like(out))
        sent.extend((dict(forward), dict(backward)))
        for x in (q, k, v, *module.parameters()):
            x.grad = None

    step()
    return (*sent, peak_bytes(step) if options.get("memory", True) else 0)


SLACK = 64 * 1024
"""Masks, log-sum-exps and other small tensors."""


def block_peak(local, encoding):
    """The most memory of attention between two parts on one process, forward and backward, with the log-sum-exp."""
    torch.manual_seed(0)
    module = posenc.create(encoding, d_model=HEADS * SIZE, heads=HEADS, head_dim=SIZE)
    q, k, v = (torch.randn(BATCH, HEADS, local, SIZE, requires_grad=True) for _ in range(3))

    def step():
        for start in (0, local):  # beside the diagonal, and on it
            plan = module.plan(posenc.Positions((start, local), local))
            out, lse = posenc.attend(q, k, v, plan, return_lse=True)
            torch.autograd.grad((out, lse), (q, k, v, *module.parameters()), (out, lse), allow_unused=True)

    step()
    return peak_bytes(step)
