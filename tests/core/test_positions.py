import pytest
import torch

import posenc
from posenc import Positions, Run


def test_an_int_is_a_length_from_zero():
    positions = Positions(q=3, k=5)
    assert positions.q == Run(0, 3)
    assert positions.k == Run(0, 5)
    assert positions.total == 5
    assert positions.reach == (-2, 4)
    assert positions.distance().tolist() == [[0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [-2, -1, 0, 1, 2]]


def test_start_and_length():
    positions = Positions(q=(4, 1), k=5)
    assert positions.distance().tolist() == [[-4, -3, -2, -1, 0]]
    assert positions.reach == (-4, 0)


def test_offset_is_known_where_no_tensor_need_be_read():
    start = torch.tensor([2, 5])
    assert Positions(q=(4, 1), k=5).offset == -4
    assert Positions(q=(start, 3), k=(start, 3)).offset == 0
    assert Positions(q=(start, 3), k=5).offset is None
    assert Positions(torch.arange(3)).offset is None
    assert Positions(torch.arange(3)).runs is None


def test_keys_default_to_queries():
    assert Positions(7).reach == (-6, 6)


def test_a_start_per_row():
    start = torch.tensor([-2, 0])
    positions = Positions(q=(start, 3), k=(start, 3))
    assert positions.q_positions().tolist() == [[-2, -1, 0], [0, 1, 2]]
    assert positions.reach == (-2, 2)
    assert positions.total.tolist() == [1, 3]
    assert Positions(q=(start + 3, 1), k=(start.clone(), 4)).reach == (-3, 0)  # row by row


def test_tensors_of_every_shape():
    flat = torch.tensor([3, 1, 9])
    assert Positions(flat).reach == (-8, 8)
    assert Positions(flat).total.item() == 10
    rows = torch.stack((flat, flat + 1))
    assert Positions(rows).distance().shape == (2, 3, 3)
    assert Positions(rows).total.tolist() == [10, 11]
    axes = torch.stack((rows, -rows), dim=-1)
    positions = Positions(axes)
    assert len(positions.q_axes) == len(positions.k_axes) == 2
    assert torch.equal(positions.distance(axis=1), -positions.distance(axis=0))
    assert positions.axis(1).reach == (-8, 8)


def test_more_axes_keep_the_runs():
    segments = torch.tensor([[0, 0, 1]])
    positions = Positions(3, more=[(segments, segments)])
    assert positions.runs is not None
    assert positions.distance(axis=1).tolist() == [[[0, 0, 1], [0, 0, 1], [-1, -1, 0]]]


def test_blocks_of_distances():
    positions = Positions(q=(10, 6), k=16)
    full = positions.distance()
    assert torch.equal(positions.distance(rows=slice(2, 5), columns=slice(3, 9)), full[2:5, 3:9])


def test_given_reach_and_total_are_kept():
    positions = Positions(torch.arange(4), reach=(-9, 9), total=100)
    assert (positions.reach, positions.total) == ((-9, 9), 100)


def test_empty_positions():
    assert Positions(q=0, k=3).distance().shape == (0, 3)
    assert Positions(torch.empty(2, 0, dtype=torch.int64)).reach == (0, 0)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(q=2.5), "is not a length, a run or a tensor"),
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
        (dict(q=(0, 3, 1)), "is not a length, a run or a tensor"),
        (dict(q=3, more=[(3, 3, (0.5, 2))]), "bounds of an axis are integers"),
    ],
)
def test_bad_places_get_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        Positions(**arguments)


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match="axes 0 to 0"):
        Positions(3).axis(1)


def test_bounds_are_read_once_or_given():
    ids = torch.tensor([[0, 2, 1], [5, 0, 0]])
    positions = Positions(3, 3, more=[(ids, ids), (ids[:, :3], ids, (0, 9)), ((4, 3), (2, 3))])
    assert not positions.bounded([1]) and positions.bounds(1) == ((0, 5), (0, 5)) and positions.bounded([1, 2])
    ids[0, 0] = 7
    assert positions.bounds(1) == ((0, 5), (0, 5))
    assert positions.bounds(2) == ((0, 9), (0, 9)) and positions.bounds(3) == ((4, 6), (2, 4))
    assert positions.bounds(0) == ((0, 2), (0, 2))
    with pytest.raises(ValueError, match=r"bounds \(3, 1\) of an axis are reversed; give \(lowest, highest\)"):
        Positions(3, 3, more=[(ids, ids, (3, 1))])
    with pytest.raises(ValueError, match="from 0 to 7 are outside their bounds, 0 to 3"):
        Positions(3, 3, more=[(ids, ids, (0, 3))])
    with pytest.raises(ValueError, match=r"\(q, k, \(lowest, highest\)\)"):
        Positions(3, 3, more=[(ids,)])


def test_a_reach_that_covers_is_kept():
    rows = torch.tensor([[0, 1], [1000, 1001]])
    assert Positions(rows, reach=(-1, 1)).reach == (-1, 1)  # rows of a batch do not meet
    assert Positions(rows).reach == (-1, 1)
    assert Positions(rows[:1], rows).reach == (-1, 1001)
    assert Positions(torch.zeros(1, 0, dtype=torch.int64), reach=(3, 4)).reach == (3, 4)


def test_an_empty_batch_reaches_nowhere():
    none = torch.zeros(0, 5, dtype=torch.int64)
    assert Positions(none, none).reach == (0, 0)
    assert Positions(none, torch.arange(7)).reach == (0, 0)
    q = torch.randn(0, 2, 5, 4)
    assert posenc.attend(q, q, q, posenc.create("kerple", heads=2).plan(Positions(none, none))).shape == (0, 2, 5, 4)
