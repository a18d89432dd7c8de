"""Peers: implementations of attention with positions. A peer has a version, may refuse a case, and returns a
differentiable function of q, k, v.

Peers share the encoding's parameters, so that their gradients can be compared too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from ..core.plan import Plan
from ..core.positions import Positions
from ..functional import attend, explain
from .measure import seconds
from .workloads import Attention, Case, Problem


class Peer:
    name = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    ceiling = False
    """Attention without positions, the base of all ratios."""

    def version(self) -> str | None:
        """None if it is not installed."""
        return torch.__version__

    def refuses(self, case: Case, kind: str) -> str | None:
        """Why it cannot do this pass ("forward" or "training") of the case, or None."""
        return None

    def detail(self, problem: Problem) -> dict:
        """More entries for its records."""
        return {}

    def kept(self, attention: Attention) -> int:
        """Bytes of tables that it keeps between calls; memory within a call is measured."""
        return 0

    def make(self, problem: Problem) -> Attention:
        raise NotImplementedError


class Plain(Peer):
    """PyTorch's attention without any position."""

    ceiling = True

    def __init__(self, name: str, device: str, backend: str | None = None):
        self.name, self.devices, self.backend = name, (device,), backend

    def make(self, problem):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        causal = problem.case.workload.causal and problem.case.workload.queries is None

        def attention(q, k, v):
            chosen = nullcontext() if self.backend is None else sdpa_kernel(getattr(SDPBackend, self.backend))
            with chosen:
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attention


class Ours(Peer):
    name = "posenc"

    def version(self):
        from .. import __version__

        return __version__

    def detail(self, problem):
        causal = problem.case.workload.causal
        return {"engine": explain(problem.q, problem.k, problem.v, problem.plan(), causal=causal).engine}

    def make(self, problem):
        causal = problem.case.workload.causal
        return lambda q, k, v: attend(q, k, v, problem.plan(), causal=causal)


def dense_bias(problem: Problem) -> Tensor:
    """[H, Lq, Lk] of an encoding that adds one number per head and distance, in q's dtype.

    Looked up once for each distance and expanded from there: with one lookup for each pair, the gradient adds 16 million
    numbers into 32 rows (on one H200, t5 at 4 x 4096 tokens: 857 ms a training step).
    """
    plan = problem.plan()
    distance = plan.positions.distance(problem.q.device)
    distances = torch.cat([distance[:, 0].flip(0), distance[0, 1:]])
    total = bias_by_distance(plan, distances)
    assert total is not None
    if problem.case.workload.causal:
        total = total.masked_fill(distances > 0, float("-inf"))
    return total.unfold(1, distance.shape[1], 1).to(problem.q.dtype).flip(1)


def bias_by_distance(plan: Plan, distances: Tensor) -> Tensor | None:
    """[H, n]: what the plan adds to a score at each distance, whatever the content; None if it adds nothing."""
    parts = [lookup.bias[:, lookup.index.lookup(distances)] for lookup in plan.lookups if lookup.bias is not None]
    if plan.slopes is not None:
        parts.append(-plan.slopes[:, None] * distances.abs())
    return sum(parts[1:], parts[0]) if parts else None


BIASES = ("t5", "clipped", "alibi")


class DenseBias(Peer):
    """A dense [H, L, L] bias as the mask of PyTorch's attention, as in most code."""

    name = "dense bias"

    def refuses(self, case, kind):
        fits = case.workload.encoding in BIASES
        return None if fits else "a dense bias cannot hold a term that depends on the content"

    def make(self, problem):
        scale = scale_of(problem.plan())

        def attention(q, k, v):
            return scaled_dot_product_attention(q, k, v, attn_mask=dense_bias(problem)[None], scale=scale)

        return attention


class Eager(Peer):
    """Scores, softmax and weighted sum as three dense steps; content terms as in the papers, vectors gathered by [L, L].

    Gathered with `embedding`: the gradient of `keys[rows]` is slower, on a GPU by seconds, and adds in the table's dtype.
    """

    name = "textbook"

    def refuses(self, case, kind):
        return None if case.workload.encoding in (*BIASES, "shaw") else "no textbook formula is written for it here"

    def make(self, problem):
        case, encoding = problem.case, problem.encoding
        scale = scale_of(problem.plan()) or case.size**-0.5

        def bias(q, k, v):
            return (q @ k.transpose(-1, -2) * scale + dense_bias(problem)).softmax(-1) @ v

        def shaw(q, k, v):
            return textbook_shaw(q, k, v, encoding, scale=scale, causal=case.workload.causal)

        return shaw if case.workload.encoding == "shaw" else bias


def textbook_shaw(q: Tensor, k: Tensor, v: Tensor, encoding, *, scale: float, causal: bool) -> Tensor:
    """Shaw's attention with a vector for every pair of positions, [L, L, D], in memory. q, k, v: [B, H, L, D]."""
    distance = Positions(q.shape[2]).distance(q.device)
    rows = distance.clamp(-encoding.left, encoding.right) + encoding.left
    content = torch.einsum("bhid,ijd->bhij", q, embedding(rows, encoding.keys[0]))
    scores = (q @ k.transpose(-1, -2) + content) * scale
    if causal:
        scores = scores.masked_fill(distance > 0, float("-inf"))
    probabilities = scores.softmax(-1)
    if encoding.values is None:
        return probabilities @ v
    return probabilities @ v + torch.einsum("bhij,ijd->bhid", probabilities, embedding(rows, encoding.values[0]))


class Flex(Peer):
    """PyTorch's FlexAttention, compiled, with a score function for the same plan.

    A lookup's gradient is atomic there, and equal addresses are slow: bias tables are expanded to one
    number per distance, and for training copied for neighbouring rows (on one H200, t5 at 4 x 4096 tokens: 956 ms with
    distances clamped, 19 with one number per distance, 12 with 64 copies). On a GPU the fastest of these tiles is used.
    """

    name = "flex attention"
    copies = 64
    tiles: tuple[dict[str, int], ...] = (
        *(
            {
                "fwd_BLOCK_M": m, "fwd_BLOCK_N": 64, "fwd_num_warps": warps, "fwd_num_stages": 3,
                "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": m, "bwd_BLOCK_M2": m, "bwd_BLOCK_N2": 64,
                "bwd_num_warps": warps, "bwd_num_stages": 1,
            }
            for m, warps in ((64, 4), (128, 8))
        ),
        {},
    )  # fmt: skip

    def refuses(self, case, kind):
        if case.workload.queries is not None:
            return "FlexAttention has another kernel for one query"
        if case.workload.options.get("values"):
            return "its score function cannot add to the values"
        if case.device == "cpu" and kind == "training":
            return "FlexAttention has no backward pass on a CPU"
        return None

    def make(self, problem):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case = problem.case
        gpu = case.device == "cuda"
        mask = None
        if case.workload.causal:
            mask = create_block_mask(
                lambda b, h, i, j: j <= i, None, None, case.length, case.length, device=case.device
            )
        # one compiled function for each length: the compiler treats a score function's integers as constants
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        chosen: dict[bool, dict] = {} if gpu and case.length >= 2048 else {True: {}, False: {}}

        def once(options: dict, q, k, v):
            plan = problem.plan()
            if plan.shift is not None:
                q = q + plan.shift.to(q.dtype)[:, None]
            if plan.rotate is not None:
                q, k = plan.rotate.rotate_q(q), plan.rotate.rotate_k(k)
            score = score_function(plan, q, k, self.copies if gpu and torch.is_grad_enabled() else 1)
            given: Any = dict(options) or None
            return compiled(q, k, v, score_mod=score, block_mask=mask, scale=scale_of(plan), kernel_options=given)

        def attention(q, k, v):
            training = torch.is_grad_enabled()
            if training not in chosen:
                chosen[training] = self._fastest(lambda options: once(options, q, k, v), q, problem.g, training)
            return once(chosen[training], q, k, v)

        return attention

    def _fastest(self, run, q, g, training: bool) -> dict:
        times = {}
        for number, options in enumerate(self.tiles):

            def call(options=options):
                out = run(options)
                if training:
                    torch.autograd.grad(out, q, g)

            try:
                call()
                times[number] = seconds(call, "cuda", 3)
            except Exception:  # tiles that this card or score function does not support
                continue
        if not times:
            raise RuntimeError("none of the tiles compiles")
        return self.tiles[min(times, key=lambda number: times[number])]


def score_function(plan: Plan, q: Tensor, k: Tensor, copies: int):
    """The plan's terms as FlexAttention's score_mod(score, b, h, i, j); None if it has none."""
    length = q.shape[2]
    scale = scale_of(plan) or q.shape[3] ** -0.5
    plan = plan.fold_query_shifts(q)
    parts: list[Callable] = []
    table = bias_by_distance(plan, torch.arange(1 - length, length, device=q.device))
    if table is not None and copies == 1:
        parts.append(lambda b, h, i, j: table[h, j - i + (length - 1)])
    elif table is not None:
        many = table[:, None].expand(-1, copies, -1).contiguous()
        parts.append(lambda b, h, i, j: many[h, i % copies, j - i + (length - 1)])
    for lookup in plan.lookups:
        index = lookup.index
        lo, hi = index.lo, index.hi
        own_rows = index.lookup(index.distances_on(q.device))
        if lookup.dot_query is not None:
            states = q if lookup.states is None else lookup.states
            rows = (states @ lookup.dot_query[:, own_rows].to(q.dtype).mT) * scale
            parts.append(lambda b, h, i, j, rows=rows, lo=lo, hi=hi: rows[b, h, i, (j - i).clamp(lo, hi) - lo])
        if lookup.dot_key is not None:
            rows = (k @ lookup.dot_key[:, own_rows].to(q.dtype).mT) * scale
            parts.append(lambda b, h, i, j, rows=rows, lo=lo, hi=hi: rows[b, h, j, (j - i).clamp(lo, hi) - lo])
    if not parts:
        return None

    def score(s, b, h, i, j):
        for part in parts:
            s = s + part(b, h, i, j)
        return s

    return score


def scale_of(plan: Plan) -> float | None:
    assert not isinstance(plan.scale, Tensor)
    return plan.scale
