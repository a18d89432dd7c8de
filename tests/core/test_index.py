import pytest
import torch

from posenc import Grid, Index, Positions, index
from posenc.core.constants import constant


def test_clip_draws_its_docstring():
    r = torch.arange(-3, 4)
    assert index.clip(2, 1).lookup(r).tolist() == [0, 0, 1, 2, 3, 3, 3]


def test_exact_has_a_row_for_each_distance():
    positions = Positions(q=(5, 2), k=7)
    exact = index.exact(positions)
    assert (exact.lo, exact.hi, exact.n) == (-6, 1, 8)
    assert (index.exact(positions, most=3).lo, index.exact(positions, most=3).hi) == (-3, 1)
    assert (index.exact(positions, future=False).lo, index.exact(positions, future=False).hi) == (-6, 0)
    apart = Positions(q=(100, 2), k=3)  # every key far behind: the clamp must still be a span
    assert (index.exact(apart, most=4).lo, index.exact(apart, most=4).hi) == (-4, -4)


def test_grid_is_row_major():
    rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
    positions = Positions(torch.stack((rows.flatten(), columns.flatten()), -1)[None])
    grid = Grid((index.clip(1, 1, axis=0), index.clip(2, 2, axis=1)))
    assert grid.n == 15
    expected = (positions.distance(axis=0) + 1) * 5 + positions.distance(axis=1) + 2
    assert torch.equal(grid.of(positions, "cpu"), expected)


def test_an_index_is_a_value():
    a, b = index.log_buckets(32, 128, causal=True), index.log_buckets(32, 128, causal=True)
    assert a == b
    assert hash(a) == hash(b)
    assert a.n == 32
    assert (a.lo, a.hi) == (-113, 0)
    assert (index.log_buckets(32, 128, causal=False).lo, index.log_buckets(32, 128, causal=False).hi) == (-91, 91)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Index(1, 0), "lo <= hi"),
        (lambda: Index(0, 3, rows=(0, 1)), "needs 4 rows"),
        (lambda: index.clip(-1, 0), "at least 0"),
        (lambda: Index(0, 1, rows=(0, -1)), "0 or more, got -1"),
        (lambda: Index(0, 1, rows=(0, 5), n=3), "names row 5 of a table with n=3"),
        (lambda: Index(0, 4, n=3), "names row 4"),
        (lambda: Index(0, 1, axis=-1), "axis=-1"),
        (lambda: index.log_buckets(31, 128, causal=False), "even"),
        (lambda: index.log_buckets(32, 8, causal=False), "max_distance"),
        (lambda: index.exact(Positions(3), most=-1), "0 or more"),
    ],
)
def test_bad_indices_get_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_constants_of_equal_numbers_keep_their_types():
    ints, floats, truths = (constant(values, torch.device("cpu")) for values in ((1, 0), (1.0, 0.0), (True, False)))
    assert [x.dtype for x in (ints, floats, truths)] == [torch.int64, torch.float32, torch.bool]
    assert constant((1, 0), torch.device("cpu")) is ints


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(lo=0.5, hi=2), "lo=0.5"), (dict(lo=0, hi=True), "hi=True"), (dict(lo=0, hi=1, rows=(0, 1.0)), "got 1.0"),
        (dict(lo=0, hi=1, rows=(0, True)), "got True"), (dict(lo=0, hi=1, rows="ab"), "tuple of integers, got str"),
        (dict(lo=0, hi=1, n=2.0), "n=2.0"),
    ],
)  # fmt: skip
def test_an_index_is_made_of_integers(options, words):
    with pytest.raises(TypeError, match=words):
        Index(**options)


def test_a_list_of_rows_becomes_a_tuple():
    assert Index(0, 2, rows=[0, 1, 1]) == Index(0, 2, rows=(0, 1, 1))
    assert hash(Index(0, 2, rows=[0, 1, 1])) == hash(Index(0, 2, rows=(0, 1, 1)))


@pytest.mark.parametrize("most, future", [(None, True), (300_000, True), (None, False), (7, True)])
def test_positions_that_jump_get_rows_for_the_distances_that_occur(most, future):
    q, k = torch.tensor([[0, 5, 10**6]]), torch.tensor([[3, 10**6, 10**6 + 1, 7], [9, 9, 2, -50_000]])
    positions = Positions(q, k)
    found = index.exact(positions, most=most, future=future)
    r = positions.distance().clamp(-(most or 2**40), most or 2**40)
    r = r if future else r.clamp(max=0)
    assert found.n <= max(24, 15)
    rows = found.of(positions, "cpu")
    assert torch.equal(found.distances_on(torch.device("cpu"))[rows], r)


def test_positions_that_do_not_jump_keep_a_plain_index():
    shuffled = torch.randperm(50)[None]
    assert index.exact(Positions(shuffled)) == Index(-49, 49)
    far = torch.stack((torch.arange(50), torch.arange(50) + 10**9))
    assert index.exact(Positions(far)) == Index(-49, 49)
    assert index.exact(Positions(torch.arange(300) * 90)).n == 599
