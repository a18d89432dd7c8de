"""posenc.contextual by its GPU code against float64: stick-breaking, CoPE and PaTH on their kernels.

    python -m tests.gpu.contextual [--out FILE.json] [--only "cope,padding|path"]
    TRITON_INTERPRET=1 python -m tests.gpu.contextual --device cpu          interpreted, without a GPU

Every case: output and gradients of all tensors, in float32 and bfloat16, within budgets (tests/rounding.py) of the plain
operations on a CPU in float64.
"""

import argparse
import json
import math
import sys

import torch

from posenc.contextual import cope, path, stick_breaking
from tests import budget, rounding, seeds

rounding.DRAWS = 32  # with fewer, one of ten thousand elements has half the deviation that it should have

FUNCTIONS = ("stick_breaking", "cope", "cope with few counts", "path", "path with gates")
LENGTHS = {"alone": (150, 150), "after others": (33, 150), "one query": (1, 90)}
"""(queries, keys)."""
CASES = {
    "alone": {}, "after others": {}, "one query": {},
    "current": {"include_current": True}, "scaled positions": {"scale_positions": True},
    "small shares": {}, "odd sizes": {}, "padding": {}, "documents": {}, "both": {},
}  # fmt: skip


def inputs(function, case):
    """Tensors in float64 that bfloat16 holds exactly, and the options of a call."""
    draw = seeds.generator(seeds.of(f"{function} {case}"))
    lq, lk = LENGTHS.get(case, (100, 100))
    heads, kv_heads, size, v_size = (3, 3, 20, 12) if case == "odd sizes" else (4, 2, 16, 16)
    make = lambda *shape: torch.randn(shape, generator=draw)  # noqa: E731
    q, k, v = make(2, heads, lq, size), make(2, kv_heads, lk, size), make(2, kv_heads, lk, v_size)
    if case == "small shares":  # so that no walk ends early, and counts stay below the table's end
        q[..., 0], k[..., 0] = 3.0, -4.0
    tensors = [q, k, v]
    if function.startswith("cope"):
        tensors.append(make(4 if "few" in function else 30, size))
    if function.startswith("path"):
        tensors += [torch.nn.functional.normalize(make(*k.shape), dim=-1), make(*k.shape[:3]).sigmoid() * 2]
        tensors += [-make(2, heads, lk).abs()] if "gates" in function else []
    options = dict(CASES[case])
    if case in ("padding", "both"):
        options["key_mask"] = torch.arange(lk)[None] >= torch.tensor([[0], [31]])
    if case in ("documents", "both"):
        options["documents"] = torch.arange(lk)[None] // 37
    return [x.bfloat16().double() for x in tensors], options


def fits(function, case):
    if function.startswith("path") and case in LENGTHS and case != "alone":
        return False
    return all(name != "include_current" or function == "stick_breaking" for name in CASES[case]) and all(
        name != "scale_positions" or function.startswith("cope") for name in CASES[case]
    )


def run(function, tensors, g, options):
    """{name: result}: outputs and gradients."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    if function == "stick_breaking":
        outs = stick_breaking(*tensors, **options)
    elif function.startswith("cope"):
        outs = (cope(*tensors, **options),)
    else:
        outs = (path(*tensors[:5], gates=tensors[5] if len(tensors) > 5 else None, **options),)
    grads = torch.autograd.grad(outs, tensors, [given.to(out) for given, out in zip(g, outs)])
    names = ("dq", "dk", "dv", "d4", "d5", "d6")
    return {**{f"out{i}": out for i, out in enumerate(outs)}, **dict(zip(names, grads))}


def of_differences(tensors, g, scale_positions=False, key_mask=None, documents=None):
    """What CoPE's kernel may add to the budgets of dq, dk and the table's gradient, by two sums that it takes in another way:

    - ds_ij = p_ij (dp_ij - g_i·o_i), as fused attention forms it. Plain operations subtract Σ_j p_ij dp_ij, in which the rounding of a dp_ij
      whose p_ij is nearly 1 cancels; that of g_i·o_i, in float32, does not, and p_ij times it is in every ds_ij.
    - the sum of the counts' gradients over j <= t is that over all keys less that over j > t, so that each has the rounding of float32 of
      the whole row's, whatever its size.
    """
    q, k, v, table = (x.repeat_interleave(len(tensors[0][0]) // len(x[0]), 1) if x.dim() == 4 else x for x in tensors)
    scale, first = q.shape[3] ** -0.5, k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])
    visible = j <= j[first:, None]
    visible = visible if key_mask is None else visible & key_mask[:, None, None]
    visible = visible if documents is None else visible & (documents[:, None, first:, None] == documents[:, None, None])
    z = scale * (q @ k.mT)
    gates = z.sigmoid() * visible
    at = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(table) - 1)
    position_scale = scale if scale_positions else 1.0
    by_count = (q @ table.mT) * position_scale
    low, share = at.long(), at - at.floor()
    below, above = by_count.gather(-1, low), by_count.gather(-1, at.ceil().long())
    s = (z + below + (above - below) * share).masked_fill(~visible, -math.inf)
    p, dp = s.softmax(-1).nan_to_num(), g @ v.mT
    unit = budget.unit(torch.float32)
    off = p * unit * budget.c(v.shape[3]) * (g * (p @ v)).abs().sum(-1, keepdim=True)  # of ds
    counts = p * (dp - (p * dp).sum(-1, keepdim=True)) * (above - below)
    whole = unit * budget.c(k.shape[2]) * counts.abs().sum(-1, keepdim=True)
    whole = whole + (off * (above - below).abs()).cumsum(-1)
    of_z = (off + whole * gates * (1 - gates)) * scale
    of_counts = torch.zeros_like(by_count).scatter_add(-1, low, off * (1 - share))
    of_counts = of_counts.scatter_add(-1, at.ceil().long(), off * share) * position_scale
    shared = len(tensors[0][0]) // len(tensors[1][0])
    return {
        "dq": of_z @ k.abs() + of_counts @ table.abs(),
        "dk": (of_z.mT @ q.abs()).unflatten(1, (-1, shared)).sum(2),
        "d4": (of_counts.mT @ q.abs()).sum((0, 1)),
    }


def check(function, case, dtype, device):
    """The largest error, as a fraction of its budget."""
    tensors, options = inputs(function, case)
    draw = seeds.generator(seeds.of("gradient"))
    g = [
        torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], generator=draw),
        torch.randn(tensors[0].shape[:3], generator=draw),
    ]
    g = [x.bfloat16().double() for x in g]
    whole = tensors[1].shape[2]  # in one block: plain operations throughout
    exact, allowed = rounding.expect(lambda: run(function, tensors, g, {**options, "block": whole}), dtype)
    ours = run(
        function,
        [x.to(device, dtype if x.dim() == 4 or function.startswith("cope") else torch.float32) for x in tensors],
        [x.to(device) for x in g],
        {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()},
    )
    if function == "stick_breaking":  # its walk ends where less than exp(-40) of a stick is left
        allowed = {name: x + 100 * math.exp(-40.0) for name, x in allowed.items()}
    if function.startswith("cope"):
        allowed = {
            **allowed,
            **{name: allowed[name] + x for name, x in of_differences(tensors, g[0], **options).items()},
        }
    for name, x in ours.items():
        budget.assert_within(x.double().cpu(), exact[name], allowed[name], f"{function}, {case}, {dtype}: {name}")
    return max(budget.excess(x.double().cpu(), exact[name], allowed[name]) for name, x in ours.items())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device == "cpu":
        from tests.engines import interpreter

        interpreter.mend()
    found, failed = {}, 0
    for function in FUNCTIONS:
        for case in CASES:
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{function}, {case}, {dtype}"
                asked = any(all(part in name for part in each.split(",")) for each in given.only.split("|"))
                if not fits(function, case) or not asked:
                    continue
                try:
                    found[name] = check(function, case, dtype, given.device)
                except Exception as error:
                    failed += 1
                    found[name] = f"{type(error).__name__}: {error}"[:300]
                print(name, found[name], flush=True)
                if given.out:
                    with open(given.out, "w") as file:
                        json.dump(found, file, indent=1)
    print(f"{len(found)} checked, {failed} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
