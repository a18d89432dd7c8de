"""The closed formulas of the field, in exact integers and Python floats.

Nothing here imports torch, so that `posenc show` can draw a scheme at once, and so that
`.to(torch.bfloat16)`, autocast or a device can never touch a bucket, a slope or a frequency.
Every other place calls these functions; none of the formulas is written twice.
"""

import math
from functools import lru_cache

from .errors import OptionError


def head_size(d_model: int, heads: int, head_dim: int | None = None) -> int:
    """head_dim where it is given, else d_model / heads."""
    if head_dim is not None:
        return head_dim
    if heads < 1 or d_model % heads:
        raise OptionError(f"d_model={d_model} is not a multiple of heads={heads}; change one, or give head_dim")
    return d_model // heads


@lru_cache(maxsize=256)
def t5_thresholds(buckets: int, max_distance: int) -> tuple[int, ...]:
    """First distance of each logarithmic bucket of one direction, by exact integer arithmetic.

    With e = buckets // 2 exact buckets and w = buckets - e logarithmic ones, bucket e + m starts at
    the smallest n with log(n/e) / log(max_distance/e) * w >= m, that is n^w e^m >= max_distance^m e^w.
    Float logarithms get this wrong at exact powers in some orders of operation; integers cannot.
    """
    exact = buckets // 2
    wide = buckets - exact
    if exact < 1:
        raise ValueError(f"T5 needs at least 2 buckets a direction, got {buckets}; give more buckets")
    if max_distance <= exact:
        raise ValueError(
            f"max_distance={max_distance} must exceed the {exact} distances that have a bucket of their own; "
            f"give max_distance > {exact} or fewer buckets"
        )
    thresholds = []
    for m in range(wide):
        bound = max_distance**m * exact**wide
        low, high = exact, max_distance
        while low < high:
            middle = (low + high) // 2
            if middle**wide * exact**m >= bound:
                high = middle
            else:
                low = middle + 1
        thresholds.append(low)
    return tuple(thresholds)


def t5_bucket(r: int, *, buckets: int, max_distance: int, causal: bool) -> int:
    """Bucket of r = key - query. Bidirectional: the upper half of the ids is for r > 0.

    causal:         n = max(-r, 0); every future key is bucket 0
    bidirectional:  n = |r|; ids [0, buckets/2) look back, [buckets/2, buckets) look ahead
    """
    side = buckets if causal else buckets // 2
    offset = side if (r > 0 and not causal) else 0
    distance = max(-r, 0) if causal else abs(r)
    if distance < side // 2:
        return offset + distance
    thresholds = t5_thresholds(side, max_distance)
    return offset + side // 2 + sum(t <= distance for t in thresholds) - 1


@lru_cache(maxsize=256)
def t5_rows(buckets: int, max_distance: int, causal: bool) -> tuple[int, int, tuple[int, ...]]:
    """(lo, hi, rows): the bucket of every r in [lo, hi]; outside it is that of the nearest end."""
    if buckets < 2 or (not causal and buckets % 2):
        raise ValueError(
            f"buckets={buckets} cannot be shared out; give an even number (bidirectional) or at least 2 (causal)"
        )
    side = buckets if causal else buckets // 2
    last = t5_thresholds(side, max_distance)[-1]
    lo, hi = -last, 0 if causal else last
    rows = tuple(t5_bucket(r, buckets=buckets, max_distance=max_distance, causal=causal) for r in range(lo, hi + 1))
    return lo, hi, rows


def deberta_bucket(distance: int, *, size: int, max_distance: int) -> int:
    """DeBERTa v2/v3's signed log bucket of distance = query - key (ceil where T5 floors).

    |distance| <= size/2 is exact; beyond, sign * (mid + ceil(log(|d|/mid) / log((M-1)/mid) * (mid-1))).
    The ceil is taken by exact integers: the smallest c with (|d|/mid)^(mid-1) <= ((M-1)/mid)^c.
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
    fits = n**steps * base**nearest <= top**nearest * base**steps
    return nearest if fits else nearest + 1


@lru_cache(maxsize=64)
def deberta_rows(size: int, max_distance: int, reversed_sign: bool = False) -> tuple[int, int, tuple[int, ...]]:
    """(lo, hi, rows) for r = key - query: row = clamp(bucket(query - key) + size, 0, 2 size - 1).

    `reversed_sign` gives the row of key - query instead (the paper's position-to-content index).
    size = max_distance means no log buckets: plain clipping, DeBERTa v1.
    """
    if size < 4 and size != max_distance:
        raise ValueError(f"position buckets must be at least 4, got {size}")
    if max_distance < size:
        raise ValueError(f"max_distance={max_distance} must be at least the number of buckets, {size}")

    def row(d: int) -> int:
        bucket = d if size == max_distance else deberta_bucket(d, size=size, max_distance=max_distance)
        return min(max(bucket + size, 0), 2 * size - 1)

    reach = max_distance
    sign = 1 if reversed_sign else -1
    rows = [row(sign * r) for r in range(-reach, reach + 1)]
    first = next(i for i in range(len(rows)) if rows[i + 1] != rows[0])
    last = next(i for i in range(len(rows) - 1, -1, -1) if rows[i - 1] != rows[-1])
    return first - reach, last - reach, tuple(rows[first : last + 1])


@lru_cache(maxsize=256)
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The authors' slopes: 2^(-8h/H) for a power of two, else those below plus every other one of twice as many."""
    if heads < 1:
        raise ValueError(f"heads={heads} must be at least 1")
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    if power < heads:
        slopes += alibi_slopes(2 * power)[0::2][: heads - power]
    return tuple(slopes)


def inverse_frequencies(size: int, base: float, *, spacing: str = "paper") -> tuple[float, ...]:
    """base^(-2c/size) for c = 0 .. ceil(size/2)-1 ("paper"), or base^(-c/(n-1)), n = size // 2 ("tensor2tensor")."""
    if base <= 0:
        raise ValueError(f"base={base} must be positive")
    if spacing == "paper":
        return tuple(base ** (-2.0 * c / size) for c in range((size + 1) // 2))
    steps = max(size // 2 - 1, 1)
    return tuple(base ** (-c / steps) for c in range(size // 2))
