"""What an encoding does to attention scores, as tensors: kernels, vectors, buckets, wavelengths, score terms.

Every number comes from the encoding's own plan; nothing here draws. Sign: r = key position - query position, so the
past is negative.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.encoding import Encoding
from ..core.index import Grid
from ..core.plan import Plan
from ..core.positions import Positions
from ..encodings.registry import ENCODINGS_BY_CLASS, create
from ..encodings.rope.rope import RoPE
from ..encodings.rope.xpos import XPos
from ..functional import scores
from ..nn.attention import Attention
from ..parallel.plan_tensors import cut_heads, put_together, take_apart
from . import trained

if TYPE_CHECKING:
    from ..encodings.rope.scaling import Scaling

LAYER_SIZES = {"d_model": 512, "heads": 8}
# A table that starts at zero draws as nothing, so where no trained one fits, these defaults give it random values.
# Encodings of images number the patches of a grid, row by row.
DRAWN_OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"std": 1.0}, "learned": {"max_length": 512}, "axial": {"columns": 16}, "sinusoidal_2d": {"columns": 16},
    "cape": {"shift": 0.0, "jitter": 0.0}, "tupe": {"max_length": 8192, "std": 1.0},
    "grid_bias": {"window": (512, 16), "std": 1.0}, "continuous_bias": {"window": (512, 16)},
    "decomposed": {"grid": (512, 16), "std": 0.1}, "mixed_rope": {"columns": 16},
    "many_axes": {"axis_of": (0, 1, 2, 0), "text": True},
}  # fmt: skip


FORMULAS = {"alibi"}
"""Encodings whose parameters start at the values of a formula, not at random ones."""
Tables = Literal["given", "none", "trained", "untrained"]


@dataclass(frozen=True)
class Subject:
    """An encoding together with the sizes of the layer it is drawn in.

    `tables` is the origin of its learned values: an encoding of the caller ("given"), none to learn, those of a small
    trained model (`trained`), or random ones. `query` [heads, head_dim] is that model's mean query, if a term needs it.
    """

    encoding: Encoding
    name: str
    d_model: int
    heads: int
    head_dim: int
    tables: Tables = "given"
    query: Tensor | None = None

    def plan(self, positions: Positions) -> Plan:
        """The encoding's plan for these positions, with an input of ones."""
        device = next((parameter.device for parameter in self.encoding.parameters()), None)
        x = torch.ones(1, positions.q_length, self.d_model, device=device)
        gates = self.encoding.keep(x[:, :1].double())  # float32 products depend on the number of tokens on some CPUs
        if gates is not None:  # tokens are all alike, so what they accumulate is a multiple of the distance
            at = positions.q_positions(device), positions.k_positions(device)
            c_q, c_k = (gates.transpose(1, 2).double() * p for p in at)
            return Plan(positions, decay=(c_q, c_k))
        try:
            return self.encoding.plan(positions, x=x)
        except ValueError:
            return self.encoding.plan(positions, x=x, host=self.make_layer(self.encoding))

    def make_layer(self, encoding: Encoding) -> Attention:
        """A layer of these sizes; causal if the encoding covers past keys only."""
        causal = encoding.causal_only or bool(getattr(encoding, "causal", False))
        return Attention(self.d_model, self.heads, head_dim=self.head_dim, encoding=encoding, causal=causal)

    @property
    def absolute(self) -> bool:
        """Whether the encoding adds a vector to the input."""
        return type(self.encoding).embed is not Encoding.embed

    def on_meta(self) -> Subject:
        """A copy on the meta device, whose plans have shapes and spans but no values."""
        return replace(self, encoding=deepcopy(self.encoding).to("meta"))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.encoding.parameters())


@torch.no_grad()
def subject(
    encoding: Encoding | str | Subject, *, seed: int = 0, d_model: int | None = None, heads: int | None = None,
    head_dim: int | None = None, **options: Any,
) -> Subject:  # fmt: skip
    """A Subject from an encoding, or from an encoding's name and options.

    A name without sizes has the tables of a trained model where there is one for its options, else random ones from
    `seed`. Random tables are drawn with `std=` too, or with sizes.
    """
    if isinstance(encoding, Subject):
        return encoding
    if isinstance(encoding, str):
        if d_model is heads is head_dim is None and trained.fits(encoding, options):
            return _trained_subject(encoding, options)
        d_model, heads = d_model or LAYER_SIZES["d_model"], heads or LAYER_SIZES["heads"]
        options = {**DRAWN_OPTIONS.get(encoding, {}), **options}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = create(encoding, d_model=d_model, heads=heads, head_dim=head_dim, **options)
        learned = any(True for _ in made.parameters()) and encoding not in FORMULAS
        tables: Tables = "untrained" if learned else "none"
        return Subject(made, encoding, d_model, heads, head_dim or d_model // heads, tables)
    if not isinstance(encoding, Encoding):
        raise TypeError(f"encoding must be an Encoding or a name, got {type(encoding).__name__}")
    if options:
        names, kind = ", ".join(options), type(encoding).__name__
        raise TypeError(f"options {names} need an encoding's name; this {kind} exists already")
    known = ENCODINGS_BY_CLASS.get(type(encoding).__name__)
    heads, head_dim = heads or _size(encoding, "heads"), head_dim or _size(encoding, "head_dim")
    if heads is None or head_dim is None:
        seen = _sizes_of(encoding)
        heads, head_dim = heads or seen[0], head_dim or seen[1]
    d_model = d_model or _size(encoding, "d_model") or heads * head_dim
    return Subject(encoding, known.name if known else type(encoding).__name__, d_model, heads, head_dim)


def _trained_subject(name: str, options: dict[str, Any]) -> Subject:
    """An encoding with a trained table. A bias serves a layer of any head size; vectors need that of their model."""
    query = trained.queries(name)
    sizes = LAYER_SIZES if query is None else trained.sizes()
    with torch.random.fork_rng(devices=[]):
        made = create(name, **sizes, **options)
    trained.fill(name, made)
    d_model, heads = sizes["d_model"], sizes["heads"]
    return Subject(made, name, d_model, heads, d_model // heads, "trained", query)


def _size(encoding: Encoding, name: str) -> int | None:
    value = getattr(encoding, name, None)
    return value if isinstance(value, int) else None


def _sizes_of(encoding: Encoding) -> tuple[int, int]:
    """(heads, head_dim) as a plan shows them; 1 and 64 where it does not."""
    try:
        plan = encoding.plan(Positions(2))
    except ValueError:
        return 1, 64
    heads = [t.shape[0] for name, t in plan.tensors() if name == "slopes" or ("lookups" in name and t.dim() < 4)]
    widths = [
        table.shape[-1]
        for lookup in plan.lookups
        for table in (lookup.dot_query, lookup.dot_key, lookup.add_value)
        if table is not None and lookup.states is None
    ]
    if plan.rotate is not None and plan.rotate.k is not None:
        widths.append(2 * plan.rotate.k[0].shape[-1])
    return max(heads, default=1), next(iter(widths), 64)


def sample_positions(length: int, most: int | None = None) -> Tensor:
    """0 .. length-1, or about `most` of them at even steps."""
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    stride = 1 if most is None else max(1, math.ceil(length / most))
    return torch.arange(0, length, stride)


def one_head(plan: Plan, head: int, heads: int) -> Plan | None:
    """The plan restricted to one head; None if it has terms that `plan_tensors` does not cut by heads."""
    phases = () if plan.rotate is None else (*(plan.rotate.q or ()), *(plan.rotate.k or ()))
    others = plan.pair, plan.cosine, plan.append, plan.sinks
    if any(term is not None for term in others) or any(x.dim() == 4 for x in phases):
        return None
    tables, queries, keys = take_apart(plan, plan.positions.q_length)
    return put_together(plan, plan.positions, cut_heads({**tables, **queries, **keys}, head, 1, heads))


@torch.no_grad()
def kernel(
    subject: Subject, q: Tensor, k: Tensor, head: int | None = None, tables: Plan | None = None
) -> Tensor:  # fmt: skip
    """The contribution of position to the scores of queries at q [Lq] and keys at k [Lk]: [heads, Lq, Lk], float64;
    with `head`, of that head only: [1, Lq, Lk].

    Queries and keys are 1 in every channel (queries of a trained model: their mean), so only their positions differ.
        rotary     the whole score
        absolute   the score of the position vectors alone, split into heads
        others     the score minus that of the content

    Later keys are NaN where the encoding is for causal attention only: xPos grows without bound there.
    `tables` is a plan of the same subject for other positions; its tables are reused if they do not depend on them.
    """
    chosen = slice(None) if head is None else slice(head, head + 1)
    if subject.absolute:
        sides = (_vectors(subject, at) for at in (q, k))
        first, second = (side.unflatten(-1, (subject.heads, -1)).transpose(0, 1)[None] for side in sides)
        return scores(first[:, chosen], second[:, chosen])[0]
    positions = Positions(q, k)
    plan = subject.plan(positions) if tables is None else replace(tables, positions=positions)
    heads = subject.heads
    query = torch.ones(subject.heads, subject.head_dim) if subject.query is None else subject.query
    if head is not None and (alone := one_head(plan, head, heads)) is not None:
        plan, heads, chosen, query = alone, 1, slice(None), query[head : head + 1]
    first = query[None, :, None].to(torch.float64).expand(1, heads, len(q), -1)
    second = torch.ones(1, heads, len(k), subject.head_dim, dtype=torch.float64)
    s = scores(first, second, plan)
    s = (s if plan.rotate is not None else s - scores(first, second, Plan(positions, scale=plan.scale)))[0, chosen]
    return s.masked_fill(k > q[:, None], torch.nan) if subject.encoding.causal_only else s


def _vectors(subject: Subject, positions: Tensor) -> Tensor:
    """The position vectors that an absolute encoding adds to its input: [L, d_model], float64."""
    zeros = torch.zeros(1, len(positions), subject.d_model, dtype=torch.float64)
    return subject.encoding.embed(zeros, Positions(positions))[0].to(torch.float64)


@torch.no_grad()
def over_distance(
    subject: Subject, r: Tensor, *, at: int | None = None, head: int | None = None, tables: Plan | None = None
) -> Tensor:  # fmt: skip
    """The kernel of one query against keys r [n] away from it: [heads, n]. `at` is the query's position."""
    at = max(0, -int(r.min())) if at is None else at
    return kernel(subject, torch.tensor([at]), at + r, head, tables)[:, 0]


@dataclass(frozen=True)
class Vectors:
    """One vector per position, or per distance: rows [n, channels]."""

    rows: Tensor
    at: Tensor  # [n]: positions, or distances r if `relative`
    relative: bool
    channel: str  # dimension, pair, head


@torch.no_grad()
def encoding(subject: Subject, length: int, head: int = 0) -> Vectors | None:
    """The vector of each position 0 .. length-1, or of each distance; None if the encoding has none.

    absolute     the vector added at each position
    rotary       cos and sin of each pair's angle at each position, all cosines first (xPos: of keys)
    content      the table row of each distance, for one head
    bias         the bias of each head at each distance
    """
    if subject.absolute:
        at = sample_positions(length)
        return Vectors(_vectors(subject, at), at, False, "dimension")
    plan = _centred(subject, length).plan(Positions(length))
    if plan.rotate is not None and plan.rotate.k is not None:
        cos, sin = (each if each.dim() == 3 else each[:, min(head, each.shape[1] - 1)] for each in plan.rotate.k)
        return Vectors(_phases((cos, sin)), sample_positions(length), False, "cos, sin of pair")
    r = torch.arange(-(length - 1), length)
    for lookup in plan.lookups:
        table = next((t for t in (lookup.dot_query, lookup.dot_key, lookup.add_value) if t is not None), None)
        if table is not None and not isinstance(lookup.index, Grid):
            table = table[min(head, table.shape[0] - 1)]
            return Vectors(table[lookup.index.lookup(r)].double(), r, True, "dimension")
    if plan.lookups or plan.slopes is not None or plan.decay is not None or plan.pair is not None:
        values = over_distance(subject, r).t()
        visible = ~values.isnan().all(-1)  # later keys are masked where the encoding is for causal attention only
        return Vectors(values[visible], r[visible], True, "head")
    return None


def _phases(phases: tuple[Tensor, ...]) -> Tensor:
    """Cosines, then sines, of all pairs: [L, channels]."""
    return torch.cat([part[0] for part in phases], dim=-1).double()


def is_centred(subject: Subject) -> bool:
    """Whether queries and keys have factors that are 1 at a centre: xPos."""
    return isinstance(subject.encoding, XPos)


def _centred(subject: Subject, length: int) -> Subject:
    """xPos with its centre in the middle of the drawn positions. The centre cancels in every score, and far from it the
    factors of queries and keys hide their vectors.
    """
    given = subject.encoding
    if not isinstance(given, XPos) or length > given.max_length:
        return subject
    rope = given.rope
    centred = XPos(
        head_dim=rope.head_dim, base=rope.base, rotary_dim=rope.rotary_dim, layout=rope.layout,
        scale_base=given.scale_base, gamma=given.gamma, max_length=length,
    )  # fmt: skip
    return replace(subject, encoding=centred)


@torch.no_grad()
def similarity(subject: Subject, length: int, head: int = 0) -> tuple[Tensor, Tensor, bool]:
    """(cosine of every two vectors of `encoding`, their positions or distances, whether those are distances).

    xPos has other vectors for queries than for keys: the product of query i and key j, 1 where i = j; NaN for later keys.
    """
    if subject.encoding.causal_only and not subject.absolute:
        at = sample_positions(length)
        rotate = _centred(subject, length).plan(Positions(length)).rotate
        if rotate is not None and rotate.q is not None and rotate.k is not None:
            products = _phases(rotate.q) @ _phases(rotate.k).t() / rotate.k[0].shape[-1]
            return products.masked_fill(at > at[:, None], torch.nan), at, False
    vectors = encoding(subject, length, head)
    if vectors is None:
        raise ValueError(f"{subject.name} has no vectors per position, so there is no similarity to draw")
    rows = torch.nn.functional.normalize(vectors.rows, dim=-1)
    return rows @ rows.t(), vectors.at, vectors.relative


@torch.no_grad()
def buckets(subject: Subject, reach: int) -> tuple[Tensor, Tensor]:
    """(r, row): the table row of each distance from -reach to reach, in the first lookup."""
    r = torch.arange(-reach, reach + 1)
    plan = subject.plan(Positions(torch.tensor([reach]), reach + r))
    for lookup in plan.lookups:
        if not isinstance(lookup.index, Grid):
            return r, lookup.index.lookup(r)
    raise ValueError(f"{subject.name} reads no table by distance, so it has no buckets; try t5, shaw or deberta")


def span_of(plan: Plan) -> tuple[int, int] | None:
    """(lo, hi): every table row is constant outside these distances; None if there is no table."""
    found = [(lookup.index.lo, lookup.index.hi) for lookup in plan.lookups if not isinstance(lookup.index, Grid)]
    return (min(lo for lo, _ in found), max(hi for _, hi in found)) if found else None


def wavelengths(head_dim: int, base: float, scaling: Scaling | None = None, total: int | None = None) -> Tensor:
    """Tokens per full rotation of each rotary pair, [head_dim / 2]; infinite for a pair of frequency 0."""
    frequencies = RoPE(head_dim=head_dim, base=base, scaling=scaling).frequencies(total)
    return math.tau / torch.tensor(frequencies, dtype=torch.float64)


def layer(subject: Subject, seed: int = 0) -> Attention:
    """An untrained layer with the encoding, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = subject.make_layer(deepcopy(subject.encoding))
    return made.double()


def content(layer: Attention, length: int, seed: int = 0) -> Tensor:
    """Random inputs for the layer: [1, length, d_model]."""
    sample_positions(length)  # raises for a length below 1
    random = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, layer.d_model, generator=random, dtype=torch.float64)


TERMS = ("content·content", "content·position", "position·content", "position·position", "rotation")


@torch.no_grad()
def decomposition(attention: Attention, x: Tensor, positions: Positions) -> dict[str, Tensor]:
    """A layer's scores for x [1, L, d_model] as a sum of TERMS, each [heads, L, L].

    Each term is a difference of `scores` with parts of q and k set to zero; "rotation" is what rotating q and k adds to
    their plain product.
    """
    encoding, position = attention.encoding, attention.encoding.embed(torch.zeros_like(x), positions)
    plan = encoding.plan(positions, x=x + position, host=attention)
    q, k, q_position, k_position = (
        projection(states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).double()
        for states in (x, position)
        for projection in (attention.q_proj, attention.k_proj)
    )
    zero_q, zero_k = torch.zeros_like(q), torch.zeros_like(k)
    unrotated = replace(plan, rotate=None)
    lookups = [
        lookup if lookup.states is None else replace(lookup, states=torch.zeros_like(lookup.states))
        for lookup in plan.lookups
    ]
    ungated = replace(unrotated, decay=None, lookups=tuple(lookups))

    def score(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
        return scores(a, b, plan)[0]

    constant = score(zero_q, zero_k, ungated)

    def product(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
        """The part that is bilinear in a and b."""
        return score(a, b, plan) - score(a, zero_k, plan) - score(zero_q, b, plan) + score(zero_q, zero_k, plan)

    terms = {
        "content·content": product(q, k, ungated),
        "content·position": product(q, k_position, ungated)
        + (score(q, zero_k, ungated) - constant)
        + (score(zero_q, zero_k, unrotated) - constant),
        "position·content": product(q_position, k, ungated) + (score(zero_q, k, ungated) - constant),
        "position·position": score(q_position, k_position, ungated),
    }
    if plan.rotate is not None:
        whole = q + q_position, k + k_position
        terms["rotation"] = score(*whole, plan) - score(*whole, unrotated)
    return terms


def untrained_phases(
    head_dim: int, base: float, scaling: Scaling | None, original: int, positions: Tensor, total: int | None = None
) -> Tensor:
    """Whether the phase of each pair at each position is outside the range of training: bool [head_dim / 2, n].

    Training covers positions 0 .. original-1 without scaling; a pair that completes a rotation covers every phase.
    """
    plain, scaled = (math.tau / wavelengths(head_dim, base, kind, total) for kind in (None, scaling))
    trained = (plain * (original - 1))[:, None]
    phase = (scaled[:, None] * positions.double()) % math.tau
    return (trained < math.tau) & (phase > trained)
