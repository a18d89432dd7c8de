"""Positions: the positions of the queries and of the keys. Masks are not here; they belong to `attend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .torch_modes import has_fake_tensors

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
WHOLE = (int, torch.SymInt)  # torch.compile traces lengths as SymInt


@dataclass(frozen=True)
class Run:
    """`length` consecutive positions from `start`: an int, or one start per row, an int tensor [B].

    Raises nothing itself: `Positions` validates it.

        >>> posenc.Run(3, 2).positions()
        tensor([3, 4])
    """

    start: int | Tensor
    length: int

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """[L], or [B, L] with a start per row."""
        steps = torch.arange(self.length, device=device)
        if isinstance(self.start, Tensor):
            return self.start.to(device=device, dtype=torch.int64)[:, None] + steps
        return steps + self.start


Side = Run | Tensor  # a Tensor is [L] or [B, L], one axis
PositionsLike = int | tuple[int | Tensor, int] | Run | Tensor  # what Positions takes for one side
FurtherAxis = tuple[PositionsLike, PositionsLike] | tuple[PositionsLike, PositionsLike, tuple[int, int]]


def _reach(q: Side, k: Side) -> tuple[int, int]:
    """(lo, hi) of p_k - p_q. Free for runs; explicit tensors are read once (a synchronisation on a GPU)."""
    if _length(q) == 0 or _length(k) == 0:
        return 0, 0
    if isinstance(q, Run) and isinstance(k, Run):
        offset = _offset(q, k)
        if offset is not None:
            return offset - q.length + 1, offset + k.length - 1
    # row by row: rows of a batch may lie far apart
    q_lo, q_hi = _ends(q)
    k_lo, k_hi = (q_lo, q_hi) if k is q else (x.to(q_lo.device) for x in _ends(k))
    if 0 in (q_lo.numel(), k_lo.numel()):  # an empty batch
        return 0, 0
    if q_lo.numel() != k_lo.numel() and min(q_lo.numel(), k_lo.numel()) > 1:  # an error, which `attend` explains
        q_lo, q_hi, k_lo, k_hi = q_lo.amin(), q_hi.amax(), k_lo.amin(), k_hi.amax()
    lo, hi = torch.stack(((k_lo - q_hi).amin(), (k_hi - q_lo).amax())).tolist()
    return lo, hi


def _offset(q: Run, k: Run) -> int | None:
    """The distance of the first key to the first query, where all rows have the same and no tensor need be read."""
    if q.start is k.start:
        return 0
    if isinstance(q.start, Tensor) or isinstance(k.start, Tensor):
        return None
    return k.start - q.start


def _ends(side: Side) -> tuple[Tensor, Tensor]:
    """The lowest and the highest position of each row, [B], or of all of them, []."""
    if isinstance(side, Run):
        start = side.start if isinstance(side.start, Tensor) else torch.tensor(side.start, device="cpu")
        start = start.to(torch.int64)
        return start, start + (side.length - 1)
    lo, hi = torch.aminmax(side.to(torch.int64), dim=-1)
    return lo, hi


def _bounds(side: Side) -> tuple[int, int]:
    if isinstance(side, Run):
        lo, hi = _bounds(side.start) if isinstance(side.start, Tensor) else (side.start, side.start)
        return lo, hi + side.length - 1
    if side.numel() == 0:
        return 0, 0
    lo, hi = torch.stack(torch.aminmax(side.to(torch.int64))).tolist()
    return lo, hi


class Positions:
    """Positions of queries and keys; the sign is decided once: r = p_k - p_q.

        Positions(q=128, k=128)                  runs from 0
        Positions(q=(127, 1), k=128)             (start, length): one new query, 128 keys
        Positions(q=(start, 64), k=(start, 64))  start an int tensor [B]: one start per row (left padding)
        Positions(q=p, k=p)                      int tensors [L], [B, L] or [B, L, axes] (packing, images, video)
        Positions(q=L, k=L, more=[(s, s)])       further axes one by one, here segments [B, L]
        Positions(q=L, more=[(s, s, (0, 3))])    the same, all of them known to be 0 to 3

    An int is a length and starts at 0, so a query that continues a cache must give its start. Lists are refused:
    they could be a run or positions.
    `k` defaults to `q`. `reach` bounds r on the first axis: free for runs, otherwise taken from the tensors
    unless given. `total`, the last key position + 1 (one per row for tensors), may be given too; [B, Lk] is one per key,
    for packed documents of different lengths, where the queries are the last of the keys.

    Raises ValueError for shapes that do not fit and TypeError for what is neither a run nor integers.

        >>> posenc.Positions(q=(3, 2), k=5).distance()  # [Lq, Lk]
        tensor([[-3, -2, -1,  0,  1],
                [-4, -3, -2, -1,  0]])
    """

    is_constant = False
    """Whether its tensors never change and outlive the call, so that engines may keep what they derive from them."""

    def __init__(
        self, q: PositionsLike, k: PositionsLike | None = None, *, more: Sequence[FurtherAxis] = (),
        reach: tuple[int, int] | None = None, total: int | Tensor | None = None,
    ):  # fmt: skip
        q_axes = _axes(q, "q")
        k_axes = q_axes if k is None else _axes(k, "k")
        if len(q_axes) != len(k_axes):
            raise ValueError(f"q has {len(q_axes)} axes and k has {len(k_axes)}; give both the same number")
        self._bounds: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        for pair in more:
            if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 3):
                raise ValueError("more takes (q, k) or (q, k, (lowest, highest)), positions of one further axis each")
            (q_side,), (k_side,) = _axes(pair[0], "q"), _axes(pair[1], "k")
            if len(pair) == 3:
                if not isinstance(pair[2], (tuple, list)) or len(pair[2]) != 2:
                    raise ValueError(f"bounds of an axis are (lowest, highest), got {pair[2]!r}")
                lowest, highest = pair[2]
                if not _is_whole(lowest) or not _is_whole(highest):
                    raise ValueError(f"bounds of an axis are integers (lowest, highest), got {pair[2]!r}")
                if lowest > highest:
                    raise ValueError(f"bounds ({lowest}, {highest}) of an axis are reversed; give (lowest, highest)")
                for side in (q_side, k_side):
                    _check_bounds(side, lowest, highest)
                self._bounds[len(q_axes)] = (lowest, highest), (lowest, highest)
            q_axes, k_axes = (*q_axes, q_side), (*k_axes, k_side)
        if reach is not None:
            _check_reach(reach, q_axes[0], k_axes[0])
        # read many times in each decoding step: plain attributes, never changed
        self.q_axes, self.k_axes = q_axes, k_axes
        """Positions along each axis: time, image row, segment."""
        self.q: Side = q_axes[0]
        self.k: Side = k_axes[0]
        self.runs: tuple[Run, Run] | None = None
        """Both sides of axis 0 as runs, or None where one is an explicit tensor."""
        self.offset: int | None = None
        """p_k - p_q of slots 0 and 0 of runs, where that is known without reading a tensor."""
        if isinstance(self.q, Run) and isinstance(self.k, Run):
            self.runs = self.q, self.k
            self.offset = _offset(self.q, self.k)
            self.q_length, self.k_length = self.q.length, self.k.length
        else:
            self.q_length, self.k_length = _length(self.q), _length(self.k)
        self._reach = reach
        self._total = total
        for number in range(1, len(q_axes)):
            lengths = _length(q_axes[number]), _length(k_axes[number])
            if lengths != (self.q_length, self.k_length):
                raise ValueError(
                    f"axis {number} has {lengths[0]} queries and {lengths[1]} keys, "
                    f"axis 0 has {self.q_length} and {self.k_length}; every axis needs the same"
                )

    # ---- one axis -------------------------------------------------------------------------------------------
    @property
    def reach(self) -> tuple[int, int]:
        return self._reach if self._reach is not None else _reach(self.q, self.k)

    @property
    def further(self) -> list[FurtherAxis]:
        """The axes after the first, as `more` takes them."""
        pairs = enumerate(zip(self.q_axes[1:], self.k_axes[1:], strict=True), 1)
        known = {number: (min(q[0], k[0]), max(q[1], k[1])) for number, (q, k) in self._bounds.items()}
        return [(*pair, known[number]) if number in known else pair for number, pair in pairs]

    def bounds(self, number: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(lowest, highest) position of the queries and of the keys on an axis; tensors are read once."""
        if number not in self._bounds:
            q, k = self.q_axes[number], self.k_axes[number]
            ours = _bounds(q) if _length(q) else (0, 0)
            self._bounds[number] = ours, ours if k is q else _bounds(k) if _length(k) else (0, 0)
        return self._bounds[number]

    def bounded(self, axes: Sequence[int]) -> bool:
        """Whether `bounds` of all these axes is known without reading a tensor."""
        return all(number in self._bounds for number in axes)

    def axis(self, number: int) -> Positions:
        """This axis alone, as a Positions."""
        if not 0 <= number < len(self.q_axes):
            raise ValueError(f"axis {number} does not exist; these positions have axes 0 to {len(self.q_axes) - 1}")
        if number == 0 and len(self.q_axes) == 1:
            return self
        return Positions(self.q_axes[number], self.k_axes[number], reach=self._reach if number == 0 else None)

    # ---- sizes ----------------------------------------------------------------------------------------------
    @property
    def has_total(self) -> bool:
        """Whether the length of the whole sequence was given, of which this is a part."""
        return self._total is not None

    @property
    def total(self) -> int | Tensor:
        """Last key position + 1: an int for plain runs, [B] (or a 0-d tensor for [L]) otherwise."""
        if self._total is not None:
            return self._total
        if isinstance(self.k, Run):
            return self.k.start + self.k.length
        if self.k.shape[-1] == 0:
            return torch.zeros(self.k.shape[:-1], dtype=torch.int64, device=self.k.device)
        return self.k.amax(-1).to(torch.int64) + 1

    # ---- tensors --------------------------------------------------------------------------------------------
    def tensors(self) -> list[Tensor]:
        """The tensors that are given: positions, and starts of runs."""
        sides = [side.start if isinstance(side, Run) else side for side in (*self.q_axes, *self.k_axes)]
        return [x for x in sides if isinstance(x, Tensor)]

    def q_positions(self, device=None, axis: int = 0) -> Tensor:
        """[Lq] or [B, Lq], int64."""
        return _positions(self.q_axes[axis], device)

    def k_positions(self, device=None, axis: int = 0) -> Tensor:
        """[Lk] or [B, Lk], int64."""
        return _positions(self.k_axes[axis], device)

    def every_axis(self, side: int, device=None) -> Tensor:
        """Positions on all axes of the queries (side 0) or keys (1): [L, axes] or [B, L, axes], int64."""
        axes = [_positions(each, device) for each in (self.q_axes, self.k_axes)[side]]
        return torch.stack(torch.broadcast_tensors(*axes), dim=-1)

    def distance(self, device=None, axis: int = 0, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """r = p_k - p_q, [Lq, Lk] or [B, Lq, Lk]; `rows` and `columns` select a block."""
        q = self.q_positions(device, axis)[..., rows]
        k = self.k_positions(device, axis)[..., columns]
        return k[..., None, :] - q[..., :, None]

    def __repr__(self) -> str:
        axes = ", ".join(f"q={_name(q)}, k={_name(k)}" for q, k in zip(self.q_axes, self.k_axes, strict=True))
        return f"Positions({axes})"


def consecutive(q_start: int, q_length: int, k_start: int, k_length: int) -> Positions:
    """Positions of two runs, cached: layers and decoding steps use the same ones."""
    if torch.compiler.is_compiling():
        if q_start == k_start and q_length == k_length:
            return Positions(Run(q_start, q_length))
        return Positions(Run(q_start, q_length), Run(k_start, k_length))
    return _consecutive(q_start, q_length, k_start, k_length)


@lru_cache(maxsize=64)
def _consecutive(q_start: int, q_length: int, k_start: int, k_length: int) -> Positions:
    """Positions of runs that need no validation: a decoding step makes new ones."""
    q = k = _run(q_start, q_length)
    if q_start != k_start or q_length != k_length:
        k = _run(k_start, k_length)
    made = Positions.__new__(Positions)
    made.__dict__.update(
        _bounds={}, q_axes=(q,), k_axes=(k,), q=q, k=k, runs=(q, k), offset=k_start - q_start, q_length=q_length,
        k_length=k_length, _reach=None, _total=None,
    )  # fmt: skip
    return made


def _run(start: int, length: int) -> Run:
    run = Run.__new__(Run)
    run.__dict__.update(start=start, length=length)
    return run


def _length(side: Side) -> int:
    return side.length if isinstance(side, Run) else side.shape[-1]


def _positions(side: Side, device) -> Tensor:
    return side.positions(device) if isinstance(side, Run) else side.to(device=device, dtype=torch.int64)


def _name(side: Side) -> str:
    if isinstance(side, Run):
        start = "one start per row" if isinstance(side.start, Tensor) else f"start {side.start}"
        return f"{side.length} from {start}"
    return f"positions {list(side.shape)}"


def _axes(spec, name: str) -> tuple[Side, ...]:
    """A specification as a tuple of one-axis sides."""
    if isinstance(spec, WHOLE) and not isinstance(spec, bool):
        spec = Run(0, spec)  # type: ignore[arg-type]
    elif isinstance(spec, tuple) and len(spec) == 2:
        spec = Run(*spec)
    if isinstance(spec, Run):
        if type(spec.start) is not int or type(spec.length) is not int or spec.length < 0:
            _check_run(spec, name)
        return (spec,)
    if isinstance(spec, Tensor):
        if spec.dtype not in INTEGERS:
            raise ValueError(f"{name} positions must be integers, got {spec.dtype}; round them, then .long()")
        if spec.dim() in (1, 2):
            return (spec,)
        if spec.dim() == 3 and spec.shape[-1] > 0:
            return tuple(spec.unbind(-1))
        raise ValueError(f"{name} positions must be [L], [B, L] or [B, L, axes], got shape {list(spec.shape)}")
    if isinstance(spec, bool):
        raise ValueError(f"{name}={spec} is neither a length nor positions")
    if isinstance(spec, list):
        raise ValueError(
            f"{name}={spec!r} is a list; give positions as torch.tensor({name}), or a run as a tuple (start, length)"
        )
    raise ValueError(
        f"{name}={spec!r} is not a length, a run or a tensor of positions; give a length, (start, length), or an int tensor [L], [B, L] or [B, L, axes]"
    )


def _check_bounds(side: Side, lowest: int, highest: int) -> None:
    """Raise where positions leave their bounds; read on a CPU only, since bounds are given to avoid synchronisations."""
    if torch.compiler.is_compiling() or not _is_readable(side):
        return
    low, high = _bounds(side)
    if _length(side) and not lowest <= low <= high <= highest:
        raise ValueError(f"positions from {low} to {high} are outside their bounds, {lowest} to {highest}")


def _check_reach(reach: tuple[int, int], q: Side, k: Side) -> None:
    """A reach that does not cover the distances would give far pairs the rows of nearer ones."""
    if not isinstance(reach, (tuple, list)) or len(reach) != 2 or not all(map(_is_whole, reach)):
        raise ValueError(f"reach={reach!r} must be two integers, (lowest, highest) of p_k - p_q")
    if reach[0] > reach[1]:
        raise ValueError(f"reach={reach} must be (lowest, highest) of p_k - p_q")
    if torch.compiler.is_compiling() or not all(map(_is_readable, (q, k))):
        return
    lo, hi = _reach(q, k)
    if _length(q) and _length(k) and not reach[0] <= lo <= hi <= reach[1]:
        raise ValueError(f"reach={reach} does not cover the distances from {lo} to {hi}; widen it, or leave it out")


def _is_readable(side: Side) -> bool:
    """Whether positions may be read: on a CPU, and elsewhere, where reading synchronises, in anomaly mode only."""
    numbers = side.start if isinstance(side, Run) else side
    if not isinstance(numbers, Tensor):
        return True
    if numbers.is_cpu:
        return not has_fake_tensors()
    return not torch.compiler.is_compiling() and torch.is_anomaly_enabled() and not numbers.is_meta


def _is_whole(value) -> bool:
    return isinstance(value, WHOLE) and not isinstance(value, bool)


def _check_run(run: Run, name: str) -> None:
    if isinstance(run.start, Tensor):
        if run.start.dim() != 1 or run.start.dtype not in INTEGERS:
            raise ValueError(
                f"a start per row must be an int tensor [B], got {run.start.dtype} of shape {list(run.start.shape)}"
            )
    elif not _is_whole(run.start):
        raise ValueError(f"{name} starts at {run.start!r}; positions must be integers")
    if not _is_whole(run.length):
        raise ValueError(f"{name} has length {run.length!r}; a length must be an integer")
    if run.length < 0:
        raise ValueError(f"{name} has length {run.length}; a length must be 0 or more")
