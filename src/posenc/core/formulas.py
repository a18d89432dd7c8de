"""The closed formulas of the field, in exact integers and Python floats.

Nothing here imports torch, so that `posenc show` starts quickly, and so that
`.to(torch.bfloat16)`, autocast or a device can never touch a bucket, a slope or a frequency.
Every other place calls these functions; none of the formulas is written twice. Those with `ops` take numbers, or tensors with
ops=torch, which has functions of the same names as `math`.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from .errors import OptionError
from .options import WIDEST, require_int, require_number


def head_size(d_model: int, heads: int, head_dim: int | None = None) -> int:
    """head_dim where it is given, else d_model / heads.

    Raises OptionError where heads do not divide d_model.

        >>> posenc.formulas.head_size(512, 8)
        64
    """
    require_int("d_model", d_model, least=1, most=WIDEST)
    require_int("heads", heads, least=1, most=WIDEST)
    if head_dim is not None:
        return require_int("head_dim", head_dim, least=1, most=WIDEST)
    if d_model % heads:
        raise OptionError(f"d_model={d_model} is not a multiple of heads={heads}; change one, or give head_dim")
    return d_model // heads


FARTHEST = 2**20
"""The largest distance that buckets may distinguish: an index stores a Python integer for each."""


@lru_cache(maxsize=256)
def t5_thresholds(buckets: int, max_distance: int) -> tuple[int, ...]:
    """First distance of each logarithmic bucket of one direction, by exact integer arithmetic.

    With e = buckets // 2 exact buckets and w = buckets - e logarithmic ones, bucket e + m starts at
    the smallest n with log(n/e) / log(max_distance/e) * w >= m, that is n^w e^m >= max_distance^m e^w.
    Float logarithms get this wrong at exact powers in some orders of operation; integers cannot.

    Raises OptionError for sizes that do not fit.

        >>> posenc.formulas.t5_thresholds(8, 32)
        (4, 7, 12, 20)
    """
    exact = buckets // 2
    wide = buckets - exact
    if exact < 1:
        raise OptionError(f"T5 needs at least 2 buckets a direction, got {buckets}; give more buckets")
    if max_distance <= exact:
        raise OptionError(
            f"max_distance={max_distance} must exceed the {exact} distances that have separate buckets; "
            f"give max_distance > {exact} or fewer buckets"
        )
    return tuple(_first_distance(exact, max_distance, m, wide) for m in range(wide))


def _first_distance(base: int, top: int, part: int, whole: int) -> int:
    """The smallest n >= base (top / base)^(part / whole), exact: a float where it is far from a whole number, integers where
    it is near one."""
    guess = base * (top / base) ** (part / whole)
    nearest = round(guess)
    if abs(guess - nearest) > 1e-12 * guess:
        return math.ceil(guess)
    common = math.gcd(part, whole)
    part, whole = part // common, whole // common
    ours, bound = nearest**whole * base**part, top**part * base**whole
    return nearest if ours >= bound else nearest + 1


def t5_bucket(r: int, *, buckets: int, max_distance: int, causal: bool) -> int:
    """Bucket of r = key - query. Bidirectional: the upper half of the ids is for r > 0.

    causal:         n = max(-r, 0); every future key is bucket 0
    bidirectional:  n = |r|; ids [0, buckets/2) for the past, [buckets/2, buckets) for later keys

    Raises OptionError for fewer than 2 buckets a direction.

        >>> [posenc.formulas.t5_bucket(r, buckets=32, max_distance=128, causal=False) for r in (-200, -1, 0, 1, 200)]
        [15, 1, 0, 17, 31]
    """
    side = buckets if causal else buckets // 2
    offset = side if (r > 0 and not causal) else 0
    distance = max(-r, 0) if causal else abs(r)
    if distance < side // 2:
        return offset + distance
    return offset + side // 2 + bisect_right(t5_thresholds(side, max_distance), distance) - 1


@lru_cache(maxsize=256)
def t5_rows(buckets: int, max_distance: int, causal: bool) -> tuple[int, int, tuple[int, ...]]:
    """(lo, hi, rows): the bucket of every r in [lo, hi]; outside it is that of the nearest end.

    Raises OptionError for sizes that do not fit.

        >>> posenc.formulas.t5_rows(buckets=8, max_distance=16, causal=True)[2][-4:]
        (3, 2, 1, 0)
    """
    require_int("max_distance", max_distance, least=1, most=FARTHEST)
    require_int("buckets", buckets, least=2, most=2 * FARTHEST)
    if not causal and buckets % 2:
        raise OptionError(
            f"buckets={buckets} cannot be divided between two directions; give an even number, or causal=True"
        )
    side = buckets if causal else buckets // 2
    last = t5_thresholds(side, max_distance)[-1]
    lo, hi = -last, 0 if causal else last
    near = _by_distance((*range(side // 2), *t5_thresholds(side, max_distance)))
    ahead = () if causal else tuple(side + bucket for bucket in near[1:])
    return lo, hi, (*near[::-1], *ahead)


def _by_distance(starts: Sequence[int]) -> list[int]:
    """The bucket of each distance 0, 1, .. starts[-1], where bucket b starts at starts[b]."""
    buckets: list[int] = []
    for bucket, (start, end) in enumerate(pairwise((*starts, starts[-1] + 1))):
        buckets += [bucket] * (end - start)
    return buckets


def deberta_bucket(distance: int, *, size: int, max_distance: int) -> int:
    """DeBERTa v2/v3's signed log bucket of distance = query - key (ceil where T5 floors).

    |distance| <= size/2 is exact; beyond, sign * (mid + ceil(log(|d|/mid) / log((M-1)/mid) * (mid-1))).
    The ceil is taken by exact integers: the smallest c with (|d|/mid)^(mid-1) <= ((M-1)/mid)^c.

    Raises nothing itself: `deberta_rows` validates.

        >>> [posenc.formulas.deberta_bucket(d, size=8, max_distance=32) for d in (1, 4, 31)]
        [1, 4, 7]
    """
    middle = size // 2
    n = abs(distance)
    if n <= middle:
        return distance
    bucket = middle + _ceil_log_ratio(n, max_distance - 1, middle, middle - 1)
    return bucket if distance > 0 else -bucket


def _ceil_log_ratio(n: int, top: int, base: int, steps: int) -> int:
    """ceil(steps * log(n/base) / log(top/base)), exact: a float guess, settled by integers near a whole number."""
    guess = steps * math.log(n / base) / math.log(top / base)
    nearest = round(guess)
    if abs(guess - nearest) > 1e-6:
        return math.ceil(guess)
    # n^steps * base^c <= top^c * base^steps  <=>  the ratio is at most c
    common = math.gcd(steps, nearest)
    steps, part = steps // common, nearest // common
    fits = n**steps * base**part <= top**part * base**steps
    return nearest if fits else nearest + 1


def _deberta_starts(size: int, max_distance: int) -> list[int]:
    """First distance of the buckets 0 .. size; an odd size's last one starts past max_distance."""
    starts = list(range(size // 2 + 1))
    for bucket in range(size // 2 + 1, size + 1):
        distances = range(starts[-1], FARTHEST + 1)
        found = bisect_left(distances, bucket, key=lambda d: deberta_bucket(d, size=size, max_distance=max_distance))
        if found == len(distances):
            raise OptionError(
                f"{size} buckets with max_distance={max_distance} distinguish distances past {FARTHEST}; "
                "give an even number of buckets"
            )
        starts.append(distances[found])
    return starts


@lru_cache(maxsize=64)
def deberta_rows(
    size: int, max_distance: int | None = None, reversed_sign: bool = False
) -> tuple[int, int, tuple[int, ...]]:
    """(lo, hi, rows) for r = key - query: row = clamp(bucket(query - key) + size, 0, 2 size - 1).

    `reversed_sign` gives the row of key - query instead (the paper's position-to-content index).
    Without max_distance there are no log buckets: plain clipping to `size`, DeBERTa v1.

    Raises OptionError for sizes that do not fit.

        >>> posenc.formulas.deberta_rows(4, 8)[2]
        (7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 0)
    """
    if max_distance is None:
        near = list(range(require_int("max_distance", size, least=1, most=FARTHEST) + 1))
    else:
        require_int("position buckets", size, least=4, most=FARTHEST)
        require_int("max_distance", max_distance, most=FARTHEST)
        if max_distance < size:
            raise OptionError(f"max_distance={max_distance} must be at least the number of buckets, {size}")
        near = _by_distance(_deberta_starts(size, max_distance))

    def row(d: int) -> int:
        return min(max((near[d] if d >= 0 else -near[-d]) + size, 0), 2 * size - 1)

    reach = len(near) - 1
    sign = 1 if reversed_sign else -1
    rows = [row(sign * r) for r in range(-reach, reach + 1)]
    first = next(i for i in range(len(rows)) if rows[i + 1] != rows[0])
    last = next(i for i in range(len(rows) - 1, -1, -1) if rows[i - 1] != rows[-1])
    return first - reach, last - reach, tuple(rows[first : last + 1])


@lru_cache(maxsize=256)
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The authors' slopes: 2^(-8h/H) for a power of two, else those below plus every other one of twice as many.

    Raises OptionError for fewer than 1 head.

        >>> posenc.formulas.alibi_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)
    """
    require_int("heads", heads, least=1, most=WIDEST)
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    if power < heads:
        slopes += alibi_slopes(2 * power)[0::2][: heads - power]
    return tuple(slopes)


def sandwich_frequencies(size: int, base: float) -> tuple[float, ...]:
    """base^(-2c/size) for c = 1 .. size // 2: Sandwich counts from 1.

    Raises nothing itself: Sandwich validates.

        >>> posenc.formulas.sandwich_frequencies(4, 10000.0)
        (0.01, 0.0001)
    """
    return tuple(base ** (-2.0 * c / size) for c in range(1, size // 2 + 1))


def sandwich_factors(heads: int) -> tuple[float, ...]:
    """H / (8h) for h = 1 .. H.

    Raises nothing itself: Sandwich validates.

        >>> posenc.formulas.sandwich_factors(4)
        (0.5, 0.25, 0.16666666666666666, 0.125)
    """
    return tuple(heads / (8.0 * h) for h in range(1, heads + 1))


def sandwich_sum(distance: Any, frequencies: Sequence[float], ops: Any = math) -> Any:
    """Σ_c (cos(distance w_c) - 1): 0 at distance 0, and falling.

    Raises nothing itself: Sandwich validates.

        >>> round(posenc.formulas.sandwich_sum(1, (1.0, 0.5)), 4)
        -0.5821
    """
    total = 0.0
    for frequency in frequencies:
        total = total + (ops.cos(distance * frequency) - 1.0)
    return total


def kerple_bias(distance: Any, a: Any, p: Any, form: str, ops: Any = math) -> Any:
    """-p ln(1 + a distance), or with form="power" -a distance^p.

    Raises nothing itself: Kerple validates.

        >>> posenc.formulas.kerple_bias(4, 0.5, 2.0, "power")
        -8.0
    """
    return -p * ops.log1p(a * distance) if form == "log" else -a * distance**p


def fire_scale(x: Any, c: Any, ops: Any = math) -> Any:
    """φ(x) = ln(1 + |c x|).

    Raises nothing itself: Fire validates.

        >>> posenc.formulas.fire_scale(0, 0.1)
        0.0
    """
    return ops.log1p(abs(c * x))


def temperature(i: Any, alpha: float, floor: float, form: str, ops: Any = math) -> Any:
    """The factor of the scores of a query at position i >= 0; forms of `Tempered`.

    Raises nothing itself: Tempered validates.

        >>> posenc.formulas.temperature(100, 0.1, 8192.0, "llama4")
        1.0
    """
    if form == "log":
        growth = ops.log((i + 1.0) / floor)
        return 1.0 + alpha * (growth + abs(growth)) / 2.0  # at least 0
    return 1.0 + alpha * ops.log1p(ops.floor((i + 1.0 if form == "llama4" else i) / floor))


def log_coordinate(x: Any, ops: Any = math) -> Any:
    """sign(x) log_8(1 + 8 |x|), what Swin v2's network reads of a difference that is 1 at the window's edge.

    Raises nothing itself.

        >>> posenc.formulas.log_coordinate(-7 / 8)
        -1.0
    """
    size = ops.log1p(8.0 * abs(x)) / math.log(8.0)
    return (x > 0) * size - (x < 0) * size  # ONNX has no copysign


def xpos_decays(size: int, gamma: float) -> tuple[float, ...]:
    """zeta_c = (2c/size + gamma) / (1 + gamma) for each rotary pair c: xPos decays its score as zeta_c^(distance / scale_base).

    Raises nothing itself: XPos validates.

        >>> posenc.formulas.xpos_decays(4, 0.5)[0]
        0.3333333333333333
    """
    return tuple((2.0 * c / size + gamma) / (1.0 + gamma) for c in range(size // 2))


def inverse_frequencies(size: int, base: float, *, spacing: str = "paper") -> tuple[float, ...]:
    """base^(-2c/size) for c = 0 .. ceil(size/2)-1 ("paper"), or base^(-c/(n-1)), n = size // 2 ("tensor2tensor").

    Raises OptionError for a base that is not positive.

        >>> posenc.formulas.inverse_frequencies(4, 10000.0)
        (1.0, 0.01)
    """
    require_int("size", size, least=0, most=WIDEST)
    require_number("base", base, above=0.0)
    if spacing == "paper":
        return tuple(base ** (-2.0 * c / size) for c in range((size + 1) // 2))
    steps = max(size // 2 - 1, 1)
    return tuple(base ** (-c / steps) for c in range(size // 2))
