"""The numbers behind every picture, taken from the encodings' own plans. Nothing here draws.

Sign everywhere: r = key position - query position; negative is the past.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.encoding import Encoding
from ..core.index import Grid
from ..core.plan import Plan
from ..core.positions import Positions
from ..encodings.registry import ENCODINGS_BY_CLASS, create
from ..functional import scores
from ..nn.attention import Attention

if TYPE_CHECKING:
    from ..encodings.rope.scaling import Scaling

SIZES = {"d_model": 512, "heads": 8}
# A table that starts at zero has nothing to show; these options stand in for training where none are given.
# Encodings of images number the patches of a grid, row by row.
DRAWN: dict[str, dict[str, Any]] = {
    "clipped": {"std": 1.0}, "learned": {"max_length": 512}, "axial": {"columns": 16}, "sinusoidal_2d": {"columns": 16},
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """An encoding with the sizes of the layer that it is drawn in."""

    encoding: Encoding
    name: str
    d_model: int
    heads: int
    head_dim: int

    def plan(self, positions: Positions) -> Plan:
        """Its plan over `where`, for content that is 1 everywhere."""
        device = next((parameter.device for parameter in self.encoding.parameters()), None)
        x = torch.ones(1, positions.q_length, self.d_model, device=device)
        try:
            return self.encoding.plan(positions, x=x)
        except ValueError:
            return self.encoding.plan(positions, x=x, host=self.host(self.encoding))

    def host(self, encoding: Encoding) -> Attention:
        """A layer of these sizes, causal where the encoding describes the past alone."""
        causal = encoding.causal_only or bool(getattr(encoding, "causal", False))
        return Attention(self.d_model, self.heads, head_dim=self.head_dim, encoding=encoding, causal=causal)

    @property
    def absolute(self) -> bool:
        """Whether the position is added to the input."""
        return type(self.encoding).embed is not Encoding.embed

    def hollow(self) -> Subject:
        """Itself without numbers: its plans tell shapes and spans, and cost nothing."""
        return replace(self, encoding=deepcopy(self.encoding).to("meta"))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.encoding.parameters())


@torch.no_grad()
def subject(
    encoding: Encoding | str | Subject, *, seed: int = 0, d_model: int | None = None, heads: int | None = None,
    head_dim: int | None = None, **options: Any,
) -> Subject:  # fmt: skip
    """An encoding, or an encoding's name with its options, ready to be drawn. Learned tables are drawn with `seed`."""
    if isinstance(encoding, Subject):
        return encoding
    if isinstance(encoding, str):
        sizes = {"d_model": d_model or SIZES["d_model"], "heads": heads or SIZES["heads"]}
        options = {**DRAWN.get(encoding, {}), **options}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = create(encoding, **sizes, head_dim=head_dim, **options)
        return Subject(made, encoding, **sizes, head_dim=head_dim or sizes["d_model"] // sizes["heads"])
    if not isinstance(encoding, Encoding):
        raise TypeError(f"give an encoding or an encoding's name, got {type(encoding).__name__}")
    if options:
        raise TypeError(f"{', '.join(options)}: options go with an encoding's name; this encoding is made already")
    known = ENCODINGS_BY_CLASS.get(type(encoding).__name__)
    heads = heads or _size(encoding, "heads") or _heads_of(encoding)
    head_dim = head_dim or _size(encoding, "head_dim") or _head_dim_of(encoding)
    d_model = d_model or _size(encoding, "d_model") or heads * head_dim
    return Subject(encoding, known.name if known else type(encoding).__name__, d_model, heads, head_dim)


def _size(encoding: Encoding, name: str) -> int | None:
    value = getattr(encoding, name, None)
    return value if isinstance(value, int) else None


def _probe(encoding: Encoding) -> Plan | None:
    try:
        return encoding.plan(Positions(2))
    except ValueError:
        return None


def _heads_of(encoding: Encoding) -> int:
    plan = _probe(encoding)
    if plan is None:
        return 1
    sizes = [t.shape[0] for name, t in plan.tensors() if name == "slopes" or ("lookups" in name and t.dim() < 4)]
    return max(sizes, default=1)


def _head_dim_of(encoding: Encoding) -> int:
    plan = _probe(encoding)
    if plan is not None:
        for lookup in plan.lookups:
            for table in (lookup.dot_query, lookup.dot_key, lookup.add_value):
                if table is not None and lookup.states is None:
                    return table.shape[-1]
        if plan.rotate is not None and plan.rotate.k is not None:
            return 2 * plan.rotate.k[0].shape[-1]
    return 64


def positions(length: int, most: int | None = None, start: int = 0) -> Tensor:
    """0 .. length-1, or about `most` of them, evenly spread: what is left out is never computed."""
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    stride = 1 if most is None else max(1, math.ceil(length / most))
    return torch.arange(start, start + length, stride)


def one_head(plan: Plan, head: int) -> Plan | None:
    """The plan of one head alone, so that the others are not computed; None where it cannot be cut."""

    def cut(tensor: Tensor | None, axis: int = 0) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[axis] == 1 else tensor.narrow(axis, head, 1)

    if plan.decay is not None or plan.pair is not None or isinstance(plan.scale, Tensor):
        return None
    return replace(
        plan,
        shift=cut(plan.shift),
        slopes=cut(plan.slopes),
        lookups=tuple(
            replace(
                lookup, bias=cut(lookup.bias), dot_query=cut(lookup.dot_query), states=cut(lookup.states, 1),
                dot_key=cut(lookup.dot_key), add_value=cut(lookup.add_value), query_shift=cut(lookup.query_shift),
            )
            for lookup in plan.lookups
        ),
    )  # fmt: skip


@torch.no_grad()
def kernel(
    subject: Subject, q: Tensor, k: Tensor, head: int | None = None, tables: Plan | None = None
) -> Tensor:  # fmt: skip
    """What position does to the score of queries at q [Lq] and keys at k [Lk]: [heads, Lq, Lk], float64;
    with `head`, of that one alone: [1, Lq, Lk].

    The content is 1 in every channel, so that only positions differ.
        rotary     the whole score
        absolute   the score of the position vectors alone, cut into heads
        others     the score less that of the content

    `tables` is a plan of the subject for other positions, where its tables do not depend on them.
    """
    chosen = slice(None) if head is None else slice(head, head + 1)
    if subject.absolute:
        sides = (_vectors(subject, place) for place in (q, k))
        first, second = (side.unflatten(-1, (subject.heads, -1)).transpose(0, 1)[None] for side in sides)
        return scores(first[:, chosen], second[:, chosen])[0]
    positions = Positions(q, k)
    plan = subject.plan(positions) if tables is None else replace(tables, positions=positions)
    heads = subject.heads
    if head is not None and (alone := one_head(plan, head)) is not None:
        plan, heads, chosen = alone, 1, slice(None)
    first, second = (torch.ones(1, heads, n, subject.head_dim, dtype=torch.float64) for n in (len(q), len(k)))
    s = scores(first, second, plan)
    return (s if plan.rotate is not None else s - scores(first, second, Plan(positions, scale=plan.scale)))[0, chosen]


def _vectors(subject: Subject, place: Tensor) -> Tensor:
    """The position vectors that an absolute encoding adds to its input: [L, d_model], float64."""
    zeros = torch.zeros(1, len(place), subject.d_model, dtype=torch.float64)
    return subject.encoding.embed(zeros, Positions(place))[0].to(torch.float64)


@torch.no_grad()
def over_distance(
    subject: Subject, r: Tensor, *, at: int | None = None, head: int | None = None, tables: Plan | None = None
) -> Tensor:  # fmt: skip
    """The kernel of one query against keys r [n] away from it: [heads, n]. `at` is the query's position."""
    place = max(0, -int(r.min())) if at is None else at
    return kernel(subject, torch.tensor([place]), place + r, head, tables)[:, 0]


@dataclass(frozen=True)
class Vectors:
    """Vectors of positions (or of distances): rows [n, channels]."""

    rows: Tensor
    places: Tensor  # positions, or distances r
    relative: bool
    channel: str  # dimension, pair, head


@torch.no_grad()
def encoding(subject: Subject, length: int, head: int = 0) -> Vectors | None:
    """The vectors that an encoding gives to positions 0 .. length-1, or to distances; None where it has none.

    absolute     the vector added at each position
    rotary       cos and sin of each pair's angle at each position, all cosines first
    content      the table row of each distance, of one head
    bias         the number that each head adds at each distance
    """
    if subject.absolute:
        place = positions(length)
        return Vectors(_vectors(subject, place), place, False, "dimension")
    plan = subject.plan(Positions(length))
    if plan.rotate is not None and plan.rotate.k is not None:
        cos, sin = plan.rotate.k
        return Vectors(torch.cat((cos[0], sin[0]), dim=-1).double(), positions(length), False, "cos, sin of pair")
    r = torch.arange(-(length - 1), length)
    for lookup in plan.lookups:
        table = next((t for t in (lookup.dot_query, lookup.dot_key, lookup.add_value) if t is not None), None)
        if table is not None and not isinstance(lookup.index, Grid):
            table = table[min(head, table.shape[0] - 1)]
            return Vectors(table[lookup.index.lookup(r)].double(), r, True, "dimension")
    if plan.lookups or plan.slopes is not None or plan.decay is not None or plan.pair is not None:
        return Vectors(over_distance(subject, r).t(), r, True, "head")
    return None


@torch.no_grad()
def similarity(subject: Subject, length: int, head: int = 0) -> tuple[Tensor, Tensor, bool]:
    """Cosine of every two vectors of `encoding`, their places, and whether those are distances."""
    vectors = encoding(subject, length, head)
    if vectors is None:
        raise ValueError(f"{subject.name} gives positions no vectors, so there is no similarity to draw")
    rows = torch.nn.functional.normalize(vectors.rows, dim=-1)
    return rows @ rows.t(), vectors.places, vectors.relative


@torch.no_grad()
def buckets(subject: Subject, reach: int) -> tuple[Tensor, Tensor]:
    """(r, row): the table row that each distance from -reach to reach reads, of the first lookup."""
    r = torch.arange(-reach, reach + 1)
    plan = subject.plan(Positions(torch.tensor([reach]), reach + r))
    for lookup in plan.lookups:
        if not isinstance(lookup.index, Grid):
            return r, lookup.index.lookup(r)
    raise ValueError(f"{subject.name} reads no table by distance, so it has no buckets; try t5, shaw or deberta")


def span(subject: Subject, length: int) -> tuple[int, int] | None:
    """(lo, hi): outside these distances every table read is constant; None where there is no table."""
    return span_of(subject.plan(Positions(length)))


def span_of(plan: Plan) -> tuple[int, int] | None:
    found = [(lookup.index.lo, lookup.index.hi) for lookup in plan.lookups if not isinstance(lookup.index, Grid)]
    return (min(lo for lo, _ in found), max(hi for _, hi in found)) if found else None


def wavelengths(head_dim: int, base: float, scaling: Scaling | None = None, total: int | None = None) -> Tensor:
    """Tokens for one full turn of each rotary pair, [head_dim / 2]; infinite where a pair stands still."""
    from ..encodings.rope.rope import RoPE

    frequencies = RoPE(head_dim=head_dim, base=base, scaling=scaling).frequencies(total)
    return math.tau / torch.tensor(frequencies, dtype=torch.float64)


def layer(subject: Subject, seed: int = 0) -> Attention:
    """An untrained layer with the encoding, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = subject.host(deepcopy(subject.encoding))
    return made.double()


def content(layer: Attention, length: int, seed: int = 0) -> Tensor:
    """Random vectors for it: [1, length, d_model]."""
    positions(length)
    random = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, layer.d_model, generator=random, dtype=torch.float64)


TERMS = ("content·content", "content·position", "position·content", "position·position", "rotation")


@torch.no_grad()
def decomposition(attention: Attention, x: Tensor, positions: Positions) -> dict[str, Tensor]:
    """A layer's scores over x [1, L, d_model] as a sum of terms, each [heads, L, L]; the last one for rotary encodings:
    what turning q and k adds to their plain product. Found by asking `scores` with parts of q and k left out.
    """
    encoding, position = attention.encoding, attention.encoding.embed(torch.zeros_like(x), positions)
    plan = encoding.plan(positions, x=x + position, host=attention)
    q, k, q_place, k_place = (
        projection(states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).double()
        for states in (x, position)
        for projection in (attention.q_proj, attention.k_proj)
    )
    zero_q, zero_k = torch.zeros_like(q), torch.zeros_like(k)
    still = replace(plan, rotate=None)
    gated = replace(
        still,
        decay=None,
        lookups=tuple(
            lookup if lookup.states is None else replace(lookup, states=torch.zeros_like(lookup.states))
            for lookup in plan.lookups
        ),
    )

    def ask(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
        return scores(a, b, plan)[0]

    nothing = ask(zero_q, zero_k, gated)

    def product(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
        """The part that is bilinear in a and b."""
        return ask(a, b, plan) - ask(a, zero_k, plan) - ask(zero_q, b, plan) + ask(zero_q, zero_k, plan)

    terms = {
        "content·content": product(q, k, gated),
        "content·position": product(q, k_place, gated)
        + (ask(q, zero_k, gated) - nothing)
        + (ask(zero_q, zero_k, still) - nothing),
        "position·content": product(q_place, k, gated) + (ask(zero_q, k, gated) - nothing),
        "position·position": ask(q_place, k_place, gated),
    }
    if plan.rotate is not None:
        terms["rotation"] = ask(q + q_place, k + k_place, plan) - ask(q + q_place, k + k_place, still)
    return terms


def unseen_phases(
    head_dim: int, base: float, scaling: Scaling | None, original: int, place: Tensor, total: int | None = None
) -> Tensor:
    """Whether training never reached the phase of each pair at each of these positions: bool [head_dim / 2, n].

    Training went over positions 0 .. original-1 without scaling; a pair that made a full turn has seen every phase.
    """
    plain, scaled = (math.tau / wavelengths(head_dim, base, kind, total) for kind in (None, scaling))
    reached = (plain * (original - 1))[:, None]
    phase = (scaled[:, None] * place.double()) % math.tau
    return (reached < math.tau) & (phase > reached)
