"""The decoding kernels under Triton's interpreter, on a CPU. Run by test_triton_decode.py, each group in a fresh process:

python tests/engines/triton_decode_cases.py GROUP
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from posenc import Attention, KVCache, Lookup, Plan, Positions, attend, index  # noqa: E402
from posenc.engines.triton import decode_launch, decode_schedule  # noqa: E402
from tests import budget  # noqa: E402
from tests.engines.groups import run_group  # noqa: E402
from tests.plans import mapped, plan_of, tensors  # noqa: E402

CALLS = []
run_decode = decode_launch.run_decode


def counted(*arguments):
    CALLS.append(arguments)
    return run_decode(*arguments)


decode_launch.run_decode = counted


def check(q, k, v, plan, dtype=torch.float32, **options):
    """Output and log-sum-exp of the decoding kernels, within their budgets."""

    def tame(name, x):
        return (x / 4 if name in ("scale", "slopes") else x).detach().float()

    plan = mapped(plan, tame)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    CALLS.clear()
    out, lse = attend(q, k, v, plan, engine="triton", return_lse=True, **options)
    assert len(CALLS) == 1, "another kernel ran"
    expected, allowed = budget.expect(q, k, v, plan, **options)
    for name, ours in (("out", out), ("lse", lse)):
        budget.assert_within(ours, expected[name], allowed[name], name)
    return out, lse


def group_slots():
    """Every slot, key lengths around tiles and shares, several queries, grouped heads, each dtype."""
    lengths = ((1, 1), (1, 63), (2, 64), (5, 65), (8, 37), (1, 130))
    slots = ("bias", "dot_query", "states", "slopes", "decay", "scale")
    cases = [(), *((slot,) for slot in slots), slots, ("exact",)]
    for number, some in enumerate(cases):
        lq, lk = lengths[number % len(lengths)]
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        q, k, v = tensors(1 + number % 2, 4, (4, 2, 1)[number % 3], lq, lk, 16, 24 if number % 2 else 16)
        check(q, k, v, plan_of(some, q, k, v, per_head=number % 2 == 0), dtype, causal=True)
    q, k, v = tensors(1, 4, 1, 1, 300, 16)  # far tiles on both sides
    check(q, k, v, plan_of(("bias", "dot_query"), q, k, v, Positions((150, 1), 300)), torch.bfloat16)
    buckets = Lookup(index.log_buckets(8, 20, causal=True), bias=torch.randn(8, 4).to(torch.bfloat16).t())
    check(q, k, v, Plan(Positions((299, 1), 300), lookups=(buckets,)), causal=True)  # a table as models store it
    kept, decode_launch.MOST_OWN_ROWS = decode_launch.MOST_OWN_ROWS, 0  # rows by their own kernel
    q, k, v = tensors(2, 4, 2, 2, 40, 16)
    for per_head, some in ((True, ("dot_query",)), (False, ("bias", "states"))):
        check(q, k, v, plan_of(some, q, k, v, per_head=per_head), torch.bfloat16)
    decode_launch.MOST_OWN_ROWS = kept
    q, k, v = tensors(1, 20, 1, 2, 33, 16)  # more rows than one tile has
    check(q, k, v, plan_of(("bias", "dot_query"), q, k, v))
    q, k, v = tensors(2, 2, 1, 3, 40, 16)
    check(q, k, v, Plan(Positions((37, 3), 40), scale=-0.3))


def group_masks():
    """Windows, padding, dense masks, a start for each row, and queries without a visible key."""
    q, k, v = tensors(2, 4, 2, 3, 70, 16)
    mixed = plan_of(("bias", "dot_query", "slopes"), q, k, v)
    visited = []
    choose = decode_schedule.choose_decode_shares
    decode_schedule.choose_decode_shares = lambda programs, keys, *rest: (
        visited.append(keys) or choose(programs, keys, *rest)
    )
    check(q, k, v, mixed, causal=True, window=20)
    assert visited == [23]  # a window reads its own keys only
    decode_schedule.choose_decode_shares = choose
    check(q, k, v, mixed, window=(5, 1))
    real = torch.arange(70)[None] < torch.tensor([[70], [31]])
    check(q, k, v, mixed, key_mask=real, causal=True)
    real[0, :19], real[0, 40] = False, False
    check(q, k, v, mixed, torch.bfloat16, key_mask=real)
    check(q, k, v, mixed, key_mask=real[:1], causal=True)
    real[1] = False
    out, lse = check(q, k, v, mixed, key_mask=real, causal=True)
    assert not out[1].any() and (lse[1] == float("-inf")).all()
    decode_launch.SCANNED = 16  # more padding than is read at a time
    check(q, k, v, mixed, key_mask=real)
    # what lies in padding does not reach the output
    wild = [x.float().masked_fill(~real[:, None, :, None], float("nan")) for x in (k, v)]
    attended = attend(q.float(), *wild, engine="triton", key_mask=real)
    assert torch.equal(attended, attend(q.float(), k.float(), v.float(), engine="triton", key_mask=real))
    check(q, k, v, mixed, mask=torch.rand(2, 1, 3, 70) > 0.3)
    check(q, k, v, mixed, torch.float16, mask=torch.randn(1, 4, 1, 70).float(), causal=True)
    starts = torch.tensor([5, 0])
    check(q, k, v, plan_of(("bias", "dot_query", "slopes"), q, k, v, Positions((starts + 60, 3), (starts * 2, 70))))
    tokens = Positions(torch.arange(70)[None, 67:] * 3, torch.arange(70)[None] * 3)
    check(q, k, v, Plan(tokens), causal=True)  # no term reads them
    q, k, v = tensors(1, 2, 1, 4, 2, 16)
    out, lse = check(q, k, v, Plan(Positions(4, 2)), causal=True)
    assert not out[:, :, :2].any() and (lse[:, :, :2] == float("-inf")).all()
    for lq, lk in ((1, 0), (0, 5)):
        q, k, v = (x.float() for x in tensors(1, 2, 1, lq, lk, 16))
        out, lse = attend(q, k, v, engine="triton", return_lse=True)
        assert not out.any() and (lse == float("-inf")).all()


def group_shifts():
    """Vectors that the kernels add to the queries, and to those of the row term: own rows and rows of a launch, grouped heads, masks."""
    kept = decode_launch.MOST_OWN_ROWS
    for number, (lq, lk, most) in enumerate(((1, 40, kept), (3, 70, 0), (16, 16, kept), (1, 130, 0))):
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)[number]
        decode_launch.MOST_OWN_ROWS = most
        q, k, v = tensors(2, 4, (4, 2)[number % 2], lq, lk, 16)
        positions = Positions((lk - lq, lq), lk)
        rows = index.exact(positions, future=number == 2)
        table, shift, other = torch.randn(4, rows.n, 16).to(dtype), torch.randn(4, 16).to(dtype), torch.randn(4, 16)
        for first, second in ((shift, other), (shift, None), (None, other)):
            plan = Plan(positions, shift=first, lookups=(Lookup(rows, dot_query=table, query_shift=second),))
            check(q, k, v, plan, dtype, causal=number != 2)
            if first is not None and second is not None:
                assert CALLS[0][0].shift is not None and CALLS[0][0].row_shift is not None and CALLS[0][0].bias is None
                check(q, k, v, plan, dtype, key_mask=torch.arange(lk)[None] < torch.tensor([[lk], [lk - 3]]))
    decode_launch.MOST_OWN_ROWS = kept


def group_order():
    """The output lies in memory as the queries do: a layer then needs no copy of it."""
    for lq, lk in ((5, 40), (16, 16)):
        q, k, v = (torch.randn(2, length, 4, 16).transpose(1, 2) for length in (lq, lk, lk))
        plan = plan_of(("bias",), q, k, v, Positions((lk - lq, lq), lk))
        out, _ = check(q, k, v, plan, torch.bfloat16, causal=True)
        assert out.transpose(1, 2).is_contiguous()
        again, _ = check(q.contiguous(), k, v, plan, torch.bfloat16, causal=True)
        assert again.is_contiguous() and torch.equal(again, out)


def group_steps():
    """Token by token equals the whole text, through Attention and KVCache; what else a call may be."""
    for name in ("none", "rope", "alibi", "t5", "clipped", "shaw", "transformer_xl"):
        layer = Attention(32, 4, kv_heads=2, encoding=name, causal=True, engine="triton").eval()
        x = torch.randn(2, 21, 32)
        with torch.no_grad():
            layer.engine, cache = "reference", KVCache(max_length=24)
            whole, parts = layer(x), [layer(x[:, :17], cache=cache)]
            layer.engine = "triton"
            CALLS.clear()
            parts += [layer(x[:, n:m], cache=cache) for n, m in ((17, 18), (18, 19), (19, 21))]
            assert len(CALLS) == 3
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
    # gradients, dropout, content of keys and values, documents: the other kernels
    q, k, v = (x.float() for x in tensors(1, 2, 1, 1, 30, 16))
    plan = Plan(Positions((29, 1), 30), lookups=(Lookup(index.clip(3, 0), bias=torch.randn(2, 4)),))
    CALLS.clear()
    attend(q.clone().requires_grad_(), k, v, plan, engine="triton")
    attend(q, k, v, plan_of(("dot_key",), q, k, v), engine="triton")
    attend(q, k, v, plan, engine="triton", documents=(torch.ones(1, 1).long(), torch.ones(1, 30).long()))
    with torch.no_grad():
        attend(q, k, v, plan, engine="triton", dropout=0.1)
    assert not CALLS

    # one operator for compilers and dispatch modes, with the same bits
    operators = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    eager = attend(q, k, v, plan, engine="triton", return_lse=True)
    with Watch():
        traced = attend(q, k, v, plan, engine="triton", return_lse=True)
    assert "posenc.decode.default" in operators and all(map(torch.equal, eager, traced))
    compiled = torch.compile(lambda *args: attend(*args, plan, engine="triton"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), eager[0])

    # every key in one share, and each tile in its own
    kept = decode_schedule.choose_decode_shares
    for shares in (1, 20):
        decode_schedule.choose_decode_shares = lambda *args, shares=shares: shares
        check(q, k, v, plan)
    decode_schedule.choose_decode_shares = kept


def group_sweep():
    """tests.gpu.sweep_decode runs every plan, at sizes for the interpreter; times are made up."""
    from tests.gpu import sweep_decode
    from tests.gpu.elsewhere import Elsewhere

    sweep_decode.SHAPES = {"small": (2, 4, 2, 33, 64)}
    sweep_decode.machine = lambda device: {}
    sweep_decode.time_device = lambda call, *rest: call() is None or 1.0
    sweep_decode.TILES = {64: ((16, 4, 1), (32, 4, 1))}
    with Elsewhere("cpu"):
        sweep_decode.sweep(list(sweep_decode.PLANS), 1e12, None)


if __name__ == "__main__":
    run_group(globals())
    print("passed")
