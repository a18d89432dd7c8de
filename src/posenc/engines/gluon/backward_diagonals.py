"""Sum a tile along its diagonals within the registers of a warp: the gradient of a bias by distance.

A tile of ds is [64 keys, columns of queries], in the layout of a product's result; each warp has 16 rows of it:

    row 8 h + g             h: 0 or 1, a register    g = lane // 4, c = lane % 4
    column 8 e + 2 c + p    registers p + 2 h + 4 e
    distance r = row - column = g - 2 c - p - 8 (e - h)

Threads exchange numbers until each distance is in one place:

    over h    the same thread has r again, one eight later: registers are added
    over p    the next row's second number of a pair has this row's distance: from thread g + 1
    over c    threads (g, c) and (g + 4, c + 2), then (g, c) and (g + 2, c + 1), have the same distances, or, where g passes 7, those
              one eight later: their registers are shifted by one first. Each keeps one half of the sums and gives the other away

After that a thread has a quarter of the eights, and r = gamma - 8 eight with gamma = (g + 4 (c // 2) - 2 (c % 2)) mod 8:

    thread c      0           1           2           3
    eights     -1 .. 1      2 .. 4      5 .. 7      8 .. 10      of tiles of 64 queries; two for each of 32

32 stores a thread to rows of their own took two thirds of a near tile's time; this takes about 100 instructions and three stores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_tiles import grid
from .kernel import by_eights, coordinates


def write_sums(eights: int) -> tuple[str, str]:
    """Assembly and constraints: a thread's 4 * eights numbers in; its eights // 4 + 1 sums and zeros out."""
    count = 4 * eights
    lines = [
        "{", ".reg .pred last, late, later, upper, odd, same;", ".reg .b32 lane, x, y, after, across, beside;",
        "mov.u32 lane, %laneid;", "and.b32 x, lane, 28;", "setp.eq.u32 last, x, 28;",
        "and.b32 x, lane, 18;", "setp.eq.u32 late, x, 2;", "and.b32 x, lane, 2;", "setp.ne.u32 upper, x, 0;",
        "and.b32 x, lane, 1;", "setp.ne.u32 odd, x, 0;",
        "shl.b32 x, lane, 3;", "xor.b32 x, x, lane;", "and.b32 x, x, 16;", "and.b32 y, lane, 9;", "or.b32 x, x, y;", "setp.eq.u32 later, x, 1;",
        "add.u32 after, lane, 4;", "and.b32 after, after, 31;", "xor.b32 across, lane, 18;",
        "selp.b32 x, 24, 8, odd;", "add.u32 x, x, lane;", "and.b32 x, x, 28;", "xor.b32 y, lane, 1;", "and.b32 y, y, 3;", "or.b32 beside, x, y;",
    ]  # fmt: skip
    made = 0

    def emit(operation: str, *given: str) -> str:
        nonlocal made
        made += 1
        lines.extend((f".reg .b32 v{made};", f"{operation} v{made}, {', '.join(given)};"))
        return f"v{made}"

    def add(a: str, b: str) -> str:
        return emit("add.f32", a, b)

    def choose(a: str, b: str, predicate: str) -> str:
        return a if a == b else emit("selp.b32", a, b, predicate)

    def receive(x: str, thread: str) -> str:
        return emit("shfl.sync.idx.b32", x, thread, "31", "0xffffffff")

    def shift(values: list[str], predicate: str) -> list[str]:
        """One further where the predicate holds."""
        return [choose(a, b, predicate) for a, b in zip(["0", *values], [*values, "0"], strict=True)]

    def halve(values: list[str], predicate: str, thread: str) -> list[str]:
        """The first half's sums with the other thread's; where the predicate holds, the second half's."""
        half = len(values) // 2
        first, second = values[:half], values[half:]
        given = [receive(choose(a, b, predicate), thread) for a, b in zip(first, second, strict=True)]
        own = [choose(b, a, predicate) for a, b in zip(first, second, strict=True)]
        return [add(a, b) for a, b in zip(own, given, strict=True)]

    def element(p: int, h: int, e: int) -> str:
        return f"${count + p + 2 * h + 4 * e}"

    pairs = []
    for p in range(2):
        inner = [add(element(p, 0, e), element(p, 1, e + 1)) for e in range(eights - 1)]
        pairs.append([element(p, 1, 0), *inner, element(p, 0, eights - 1)])
    moved = shift([receive(x, "after") for x in pairs[1]], "last")
    values = [*(add(a, b) for a, b in zip(pairs[0], moved, strict=False)), moved[-1]]
    values = shift(shift(values, "late"), "later")
    values = halve(halve(values, "upper", "across"), "odd", "beside")
    lines.extend(f"mov.b32 ${at}, {values[at] if at < len(values) else '0'};" for at in range(count))
    lines.append("}")
    return "\n".join(lines), ",".join(["=r"] * count + ["f"] * count)


_SHORT, _SHORT_CONSTRAINTS = write_sums(4)
_LONG, _LONG_CONSTRAINTS = write_sums(8)
SHORT = gl.constexpr(_SHORT)
SHORT_CONSTRAINTS = gl.constexpr(_SHORT_CONSTRAINTS)
LONG = gl.constexpr(_LONG)
LONG_CONSTRAINTS = gl.constexpr(_LONG_CONSTRAINTS)


@gluon.jit
def sum_diagonals(ds):
    """[64, columns] -> sums over a warp's rows, their distances (less that of the tile's first row and column), and whether they are any: [64, 8] each."""
    x = by_eights(ds)
    EIGHTS: gl.constexpr = x.shape[1]
    COUNT: gl.constexpr = EIGHTS // 4 + 1
    if EIGHTS == 4:
        y = gl.inline_asm_elementwise(SHORT, SHORT_CONSTRAINTS, [x], dtype=gl.int32, is_pure=True, pack=16)
    else:
        y = gl.inline_asm_elementwise(LONG, LONG_CONSTRAINTS, [x], dtype=gl.int32, is_pure=True, pack=32)
    row, eight, column = coordinates(y)
    sums = gl.sum(gl.where(eight == 0, y, 0), 1).to(gl.float32, bitcast=True)  # all others are zeros
    row, column = grid(sums)
    c = column // 2
    k = row // 8 % 2 * 2 + column % 2
    gamma = (row + c // 2 * 4 + c % 2 * 6) % 8
    distance = (row // 16 * 16 + gamma + 8 - 8 * COUNT * c) - 8 * k
    return sums, distance, k < COUNT
