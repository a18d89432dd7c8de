import pytest
import torch

from posenc import Run, Where


def test_an_int_is_a_length_from_zero():
    where = Where(q=3, k=5)
    assert where.q == Run(0, 3)
    assert where.k == Run(0, 5)
    assert where.total == 5
    assert where.reach == (-2, 4)
    assert where.distance().tolist() == [[0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [-2, -1, 0, 1, 2]]


def test_start_and_length():
    where = Where(q=(4, 1), k=5)
    assert where.distance().tolist() == [[-4, -3, -2, -1, 0]]
    assert where.reach == (-4, 0)


def test_offset_is_known_where_no_tensor_need_be_read():
    start = torch.tensor([2, 5])
    assert Where(q=(4, 1), k=5).offset == -4
    assert Where(q=(start, 3), k=(start, 3)).offset == 0
    assert Where(q=(start, 3), k=5).offset is None
    assert Where(torch.arange(3)).offset is None
    assert Where(torch.arange(3)).runs is None


def test_keys_default_to_queries():
    assert Where(7).reach == (-6, 6)


def test_a_start_per_row():
    start = torch.tensor([-2, 0])
    where = Where(q=(start, 3), k=(start, 3))
    assert where.q_positions().tolist() == [[-2, -1, 0], [0, 1, 2]]
    assert where.reach == (-2, 2)
    assert where.total.tolist() == [1, 3]
    assert Where(q=(start + 3, 1), k=(start.clone(), 4)).reach == (-3, 0)  # row by row


def test_tensors_of_every_shape():
    flat = torch.tensor([3, 1, 9])
    assert Where(flat).reach == (-8, 8)
    assert Where(flat).total.item() == 10
    rows = torch.stack((flat, flat + 1))
    assert Where(rows).distance().shape == (2, 3, 3)
    assert Where(rows).total.tolist() == [10, 11]
    axes = torch.stack((rows, -rows), dim=-1)
    where = Where(axes)
    assert len(where.q_axes) == len(where.k_axes) == 2
    assert torch.equal(where.distance(axis=1), -where.distance(axis=0))
    assert where.axis(1).reach == (-8, 8)


def test_more_axes_keep_the_runs():
    segments = torch.tensor([[0, 0, 1]])
    where = Where(3, more=[(segments, segments)])
    assert where.runs is not None
    assert where.distance(axis=1).tolist() == [[[0, 0, 1], [0, 0, 1], [-1, -1, 0]]]


def test_blocks_of_distances():
    where = Where(q=(10, 6), k=16)
    full = where.distance()
    assert torch.equal(where.distance(rows=slice(2, 5), columns=slice(3, 9)), full[2:5, 3:9])


def test_given_reach_and_total_are_kept():
    where = Where(torch.arange(4), reach=(-9, 9), total=100)
    assert (where.reach, where.total) == ((-9, 9), 100)


def test_empty_positions():
    assert Where(q=0, k=3).distance().shape == (0, 3)
    assert Where(torch.empty(2, 0, dtype=torch.int64)).reach == (0, 0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(q=2.5), "no positions"),
        (dict(q=True), "neither a length"),
        (dict(q=-1), "0 or more"),
        (dict(q=(0.5, 2)), "must be integers"),
        (dict(q=(0, 2.0)), "must be an integer"),
        (dict(q=torch.tensor([0.0, 1.0])), "must be integers"),
        (dict(q=torch.zeros(1, 2, 3, 4, dtype=torch.int64)), r"\[B, L, axes\]"),
        (dict(q=(torch.zeros(2, 2, dtype=torch.int64), 3)), r"int tensor \[B\]"),
        (dict(q=torch.zeros(1, 2, 2, dtype=torch.int64), k=2), "2 axes and k has 1"),
        (dict(q=3, more=[(torch.zeros(1, 2, dtype=torch.int64), 3)]), "axis 1 has 2 queries"),
        (dict(q=3, more=[3]), "one further axis each"),
        (dict(q=3, reach=(4, 1)), "lowest, highest"),
        (dict(q=3, reach=(0.5, 1)), "two integers"),
        (dict(q=3, reach=7), "two integers"),
        (dict(q=3, reach=(-1, 2)), "does not cover the distances from -2 to 2"),
        (dict(q=(torch.tensor([0, 5]), 3), k=8, reach=(-5, 7)), "from -7 to 7"),
        (dict(q=torch.tensor([0, 9]), reach=(-8, 9)), "from -9 to 9"),
        (dict(q=[3, 7]), r"is a list; give positions as torch.tensor\(q\), or a run as a tuple"),
        (dict(q=3, k=[0, 3]), r"torch.tensor\(k\)"),
        (dict(q=torch.tensor([True, False])), "must be integers"),
        (dict(q=(True, 3)), "must be integers"),
        (dict(q=(0, 3, 1)), "no positions"),
        (dict(q=3, more=[(3, 3, (0.5, 2))]), "bounds of an axis are integers"),
    ],
)
def test_bad_places_get_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        Where(**arguments)


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match="axes 0 to 0"):
        Where(3).axis(1)


def test_bounds_are_read_once_or_given():
    ids = torch.tensor([[0, 2, 1], [5, 0, 0]])
    where = Where(3, 3, more=[(ids, ids), (ids[:, :3], ids, (0, 9)), ((4, 3), (2, 3))])
    assert not where.bounded([1]) and where.bounds(1) == ((0, 5), (0, 5)) and where.bounded([1, 2])
    ids[0, 0] = 7
    assert where.bounds(1) == ((0, 5), (0, 5))
    assert where.bounds(2) == ((0, 9), (0, 9)) and where.bounds(3) == ((4, 6), (2, 4))
    assert where.bounds(0) == ((0, 2), (0, 2))
    with pytest.raises(ValueError, match=r"between 3 and 1 cannot be: give \(lowest, highest\)"):
        Where(3, 3, more=[(ids, ids, (3, 1))])
    with pytest.raises(ValueError, match="from 0 to 7 were said to lie between 0 and 3"):
        Where(3, 3, more=[(ids, ids, (0, 3))])
    with pytest.raises(ValueError, match=r"\(q, k, \(lowest, highest\)\)"):
        Where(3, 3, more=[(ids,)])


def test_a_reach_that_covers_is_kept():
    rows = torch.tensor([[0, 1], [1000, 1001]])
    assert Where(rows, reach=(-1, 1)).reach == (-1, 1)  # rows of a batch do not meet
    assert Where(rows).reach == (-1, 1)
    assert Where(rows[:1], rows).reach == (-1, 1001)
    assert Where(torch.zeros(1, 0, dtype=torch.int64), reach=(3, 4)).reach == (3, 4)
