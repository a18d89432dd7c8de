"""The closed formulas against the published tables and worked numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posenc import formulas

# distance: (bidirectional r = -n, bidirectional r = +n, causal r = -n), 32 buckets, max_distance 128
T5_TABLE = {
    0: (0, 0, 0), 1: (1, 17, 1), 2: (2, 18, 2), 7: (7, 23, 7), 8: (8, 24, 8), 11: (8, 24, 11), 12: (9, 25, 12),
    15: (9, 25, 15), 16: (10, 26, 16), 18: (10, 26, 16), 19: (10, 26, 17), 20: (10, 26, 17), 21: (10, 26, 18),
    22: (10, 26, 18), 23: (11, 27, 18), 31: (11, 27, 21), 32: (12, 28, 21), 45: (12, 28, 23), 46: (13, 29, 24),
    63: (13, 29, 26), 64: (14, 30, 26), 90: (14, 30, 29), 91: (15, 31, 29), 98: (15, 31, 29), 99: (15, 31, 30),
    112: (15, 31, 30), 113: (15, 31, 31), 127: (15, 31, 31), 128: (15, 31, 31), 1000: (15, 31, 31),
}  # fmt: skip


@pytest.mark.parametrize("distance", T5_TABLE)
def test_t5_buckets_are_the_published_ones(distance):
    back, ahead, causal = T5_TABLE[distance]
    options = dict(buckets=32, max_distance=128)
    assert formulas.t5_bucket(-distance, causal=False, **options) == back
    assert formulas.t5_bucket(distance, causal=False, **options) == ahead
    assert formulas.t5_bucket(-distance, causal=True, **options) == causal
    assert formulas.t5_bucket(distance, causal=True, **options) == 0


def test_t5_thresholds():
    assert formulas.t5_thresholds(16, 128) == (8, 12, 16, 23, 32, 46, 64, 91)
    assert formulas.t5_thresholds(32, 128) == (16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113)


@given(st.integers(1, 40).map(lambda n: 2 * n), st.integers(2, 4000), st.booleans())
def test_t5_rows_are_the_bucket_of_every_distance(buckets, max_distance, causal):
    side = buckets if causal else buckets // 2
    if side < 2 or max_distance <= side // 2:
        with pytest.raises(ValueError):
            formulas.t5_rows(buckets, max_distance, causal)
        return
    lo, hi, rows = formulas.t5_rows(buckets, max_distance, causal)
    options = dict(buckets=buckets, max_distance=max_distance, causal=causal)
    for r in (lo - 1000, lo - 1, lo, (lo + hi) // 2, hi, hi + 1, hi + 1000):
        assert formulas.t5_bucket(r, **options) == rows[min(max(r, lo), hi) - lo]
    assert set(rows) <= set(range(buckets))
    past = rows[: -lo + 1][::-1]  # distances 0, 1, 2, ...
    assert list(past) == sorted(past)


def test_deberta_buckets_are_the_worked_ones():
    big = {0: 0, 1: 1, 127: 127, 128: 128, 129: 129, 130: 130, 133: 132, 192: 166, 255: 192, 256: 192, 257: 192,
           384: 229, 510: 255, 511: 255, 512: 256, 612: 272}  # fmt: skip
    small = {15: 15, 16: 16, 17: 17, 18: 17, 21: 18, 24: 19, 31: 21, 32: 22, 33: 22, 96: 29, 126: 31, 127: 31, 128: 32}
    for size, reach, table in ((256, 512, big), (32, 128, small)):
        for distance, bucket in table.items():
            assert formulas.deberta_bucket(distance, size=size, max_distance=reach) == bucket
            assert formulas.deberta_bucket(-distance, size=size, max_distance=reach) == -bucket


@pytest.mark.parametrize("size, reach", [(256, 512), (32, 128), (4, None), (6, None), (6, 6), (5, 12), (9, 50)])
@pytest.mark.parametrize("reversed_sign", [False, True])
def test_deberta_rows_are_constant_outside_their_span(size, reach, reversed_sign):
    lo, hi, rows = formulas.deberta_rows(size, reach, reversed_sign)

    def row(r):
        d = r if reversed_sign else -r
        bucket = d if reach is None else formulas.deberta_bucket(d, size=size, max_distance=reach)
        return min(max(bucket + size, 0), 2 * size - 1)

    for r in range(-2000, 2001):
        assert row(r) == rows[min(max(r, lo), hi) - lo]
    assert rows[0] != rows[1]
    assert rows[-1] != rows[-2]


def test_alibi_slopes_are_the_authors():
    exponents = {1: [8], 2: [4, 8], 4: [2, 4, 6, 8], 6: [2, 4, 6, 8, 1, 3], 8: [1, 2, 3, 4, 5, 6, 7, 8],
                 12: [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]}  # fmt: skip
    for heads, expected in exponents.items():
        assert [-math.log2(slope) for slope in formulas.alibi_slopes(heads)] == pytest.approx(expected)
    for heads in range(1, 130):
        slopes = formulas.alibi_slopes(heads)
        assert len(slopes) == len(set(slopes)) == heads


@pytest.mark.parametrize("heads", [0, -1])
def test_alibi_needs_a_head(heads):
    with pytest.raises(ValueError, match="at least 1"):
        formulas.alibi_slopes(heads)
