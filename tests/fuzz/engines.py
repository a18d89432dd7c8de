"""Part 1: an engine on a random case. Output, log-sum-exp and every wanted gradient, each within its budget."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from posenc import Index, UnsupportedPlan, attend, explain
from posenc.engines import blocked
from posenc.engines.cpu import block_sizes, packed
from tests import budget
from tests.fuzz.case import Case, draw, features, for_hopper, names, resize
from tests.fuzz.refused import Refused
from tests.fuzz.render import BLOCKED, BLOCKS, HOPPER, PACKED, render, script
from tests.fuzz.shrink import simpler

__all__ = ["check", "draw", "features", "for_hopper", "resize", "script", "simpler"]


def check(case: Case, engine: str, device: str = "cpu") -> list[str]:
    """What is wrong; nothing where all is right. Raises Refused where the engine refuses."""
    space: dict = {}
    exec(compile(render(case, device), "<case>", "exec"), space)
    wanted = names(case) if case.wanted is None else list(case.wanted)
    leaves = {name: x.requires_grad_() if name in wanted else x for name, x in space["leaves"].items()}
    before = {name: leaves[name].detach().clone() for name in "qkv"}
    call = (leaves["q"], leaves["k"], leaves["v"], space["plan_of"](leaves))
    options, g, g_lse = space["options_of"](leaves), space["g"], space["g_lse"]
    with warnings.catch_warnings(), _settings(case):
        warnings.simplefilter("ignore")
        try:
            results, kept, faults = _run(case, engine, call, options, wanted, leaves, g, g_lse)
        except UnsupportedPlan as reason:
            raise Refused(str(reason)) from None
    both = {} if not wanted else {"g": g, "g_lse": g_lse}
    expected, allowed = budget.expect(*call, **both, **options, kept=kept, **arithmetic(call, engine))
    least, least_out = resolution(call, engine, g, g_lse)
    for name, actual in results.items():
        if actual is not None and name != "lse" and actual.dtype != leaves.get(name, call[0]).dtype:
            faults.append(f"{name} has dtype {actual.dtype}")
        try:
            budget.assert_within(
                actual, expected[name], allowed[name] + {"out": least_out, "lse": 0.0}.get(name, least), name
            )
        except AssertionError as error:
            faults.append(str(error))
    faults += [f"{name} was changed" for name, x in before.items() if not torch.equal(x, leaves[name].detach())]
    return faults


def resolution(call, engine: str, g: Tensor, g_lse: Tensor) -> tuple[float, float]:
    """What an element of a gradient, and one of the output, may be off by in any case.

    With a position for each token the triton engine adds what content terms get as 64-bit integers, whose unit is 2^-60 of
    the largest sum there can be: |dS| <= 2 max|g| max|v| Dv + 2 max|g_lse|, a term for each query. Such sums are
    multiplied with a row of a table, or with states, for each key. Attention per distance, which add_value multiplies, is
    such a sum too: of probabilities, in units of 2^-50.
    """
    q, k, v, plan = call
    if engine != "triton" or plan.positions.runs is not None or not q.numel() or not k.numel():
        return 0.0, 0.0
    most = lambda *tensors: max((float(x.detach().abs().max()) for x in tensors if x is not None), default=0.0)  # noqa: E731
    tables = [x for one in plan.lookups for x in (one.dot_query, one.dot_key, one.add_value, one.states)]
    values = most(v) + most(*(one.add_value for one in plan.lookups))
    scale = max(1.0, most(plan.scale) if isinstance(plan.scale, Tensor) else abs(plan.scale or 0.0))
    terms = 2 * q.shape[2] * scale * (most(g) * values * v.shape[3] + most(g_lse))
    added = 2.0**-50 * k.shape[2] * most(*(one.add_value for one in plan.lookups))
    mass = 2.0**-50 * k.shape[2] * q.shape[2] * most(g) if added else 0.0
    return mass + 2.0**-59 * terms * k.shape[2] * q.shape[3] * max(1.0, most(q, k, g, *tables)), added


def arithmetic(call, engine: str) -> dict:
    """What `budget.expect` needs to know of an engine's arithmetic.

    recomputed: backward scores come from another product than forward ones, in kernels that keep no probabilities. The
    cpu engine leaves plans without content to such a kernel of PyTorch's; what it computes itself is normalised.
    exp: that kernel of PyTorch's has a cheaper one for half precision.
    """
    q, _, _, plan = call
    content = plan.decay is not None or any(
        x is not None
        for one in plan.lookups
        for x in (one.dot_query, one.dot_key, one.add_value)
        if isinstance(one.index, Index) and one.index.axis == 0  # terms of further axes become channels of q and k
    )
    on_cpu = engine in ("cpu", "sdpa", "auto")
    half = q.dtype in (torch.bfloat16, torch.float16)
    recomputed = engine == "triton" or (on_cpu and not content)
    return {"recomputed": recomputed, "exp": budget.HALF_EXP if on_cpu and half else 0.0}


def _run(case, engine, call, options, wanted, leaves, g, g_lse):
    kept, faults = None, []
    if case.dropout:
        kept = kept_by(call, options, case.dropout, engine, case.lse)
        faults = rate_faults(call, options, kept, case.dropout)
        torch.manual_seed(1)
    out, lse = called(call, options, case.dropout, engine, case.lse)
    results: dict[str, Tensor | None] = {"out": out} if lse is None else {"out": out, "lse": lse}
    if wanted:
        if not out.requires_grad:
            return results, kept, [*faults, f"{wanted} want gradients, and the output has none"]
        outs, weights = zip(*((x, w) for x, w in ((out, g), (lse, g_lse)) if x is not None and x.requires_grad))
        given = [leaves[name] for name in wanted]
        results.update(zip(wanted, torch.autograd.grad(outs, given, weights, allow_unused=True)))
    return results, kept, faults


def called(call, options, dropout: float, engine: str, lse: bool) -> tuple[Tensor, Tensor | None]:
    if lse:
        return attend(*call, **options, dropout=dropout, engine=engine, return_lse=True)
    return attend(*call, **options, dropout=dropout, engine=engine), None


def kept_by(call, options, rate: float, engine: str, lse: bool) -> Tensor:
    """What dropout multiplies each probability with under seed 1, [B, H, Lq, Lk].

    Values that are the unit matrix make the probabilities, dropped, the output. Values by distance are left out of
    this call, in the same engine; they and the values' size must not change which ones are dropped. PyTorch draws other numbers for
    tensors without gradients, so this call wants them where the other one does.
    """
    q, k, v, plan = call
    engine = explain(q, k, v, plan, dropout=rate, engine=engine, return_lse=lse, **options).engine
    torch.manual_seed(1)
    unit = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
    unit = unit.requires_grad_(any(x.requires_grad for x in (q, k, v, *dict(plan.tensors()).values())))
    lookups = tuple(replace(one, add_value=None) for one in plan.lookups)
    rotate = plan.rotate if plan.rotate is None else replace(plan.rotate, values=False)
    plan = replace(plan, lookups=lookups, rotate=rotate)
    out = called((q, k, unit, plan), options, rate, engine, lse)[0]
    return (out.detach() != 0.0).double() / (1 - rate)


def rate_faults(call, options, kept: Tensor, rate: float) -> list[str]:
    """Among probabilities that cannot vanish, as many are dropped as six standard deviations allow."""
    q, k, v, plan = call
    unit = torch.eye(k.shape[2], dtype=torch.float64, device=v.device).expand(*k.shape[:2], -1, -1)
    lookups = tuple(replace(one, add_value=None) for one in plan.lookups)
    rotate = plan.rotate if plan.rotate is None else replace(plan.rotate, values=False)
    with torch.no_grad():
        p = budget.expect(q, k, unit, replace(plan, lookups=lookups, rotate=rotate), **options)[0]["out"]
    there = p > 1e-6
    count, dropped = int(there.sum()), int(((kept == 0.0) & there).sum())
    if abs(dropped - rate * count) > 6 * (count * rate * (1 - rate)) ** 0.5 + 1:
        return [f"dropout={rate} dropped {dropped} of {count} probabilities"]
    return []


@contextmanager
def _settings(case: Case):
    """The block sizes of the cpu and blocked engines, from where on the Gluon kernel runs, and fresh memory."""
    changed = []
    if case.blocks:
        sizes = ((block_sizes, BLOCKS[case.blocks]), (blocked, BLOCKED), (packed, PACKED))
        changed = [(module, *one) for module, some in sizes for one in some.items()]
    if case.hopper:
        from posenc.engines import gluon  # needs Triton

        changed += [(gluon, *one) for one in HOPPER.items()]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    mode = torch.get_deterministic_debug_mode()  # use_deterministic_algorithms would import the compiler
    try:
        for module, name, value in changed:
            setattr(module, name, value)
        torch.set_deterministic_debug_mode("error" if case.poison else mode)
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        for module, name, value in before:
            setattr(module, name, value)
