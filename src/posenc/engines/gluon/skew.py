"""Skew a band within the registers of a warpgroup: out[i, j] = band[i, j - i + 64] for a tile of 64 queries and 64 keys.

A product of queries with the table's rows gives a number for each query i and distance; a tile of scores needs them by query and key. In the
layout of a product's result a row lies in four neighbouring threads of a warp, each with two of every eight columns:

    row 16 w + 8 h + s          w: the warp    h: 0 or 1, its registers    s = lane // 4, t = lane % 4
    column 8 u + 2 t, + 1       one register of two numbers for each h and u: register 2 u + h

So the shift by i = 16 w + 8 h + s columns is

    by 16 w       2 w registers further: two selections by the bits of w
    by 8 h        one register further: known when compiled
    by s          within the four threads of a row, s = 2 a + b: a register's first number goes to the thread t + a, its second one to t + a + b
                  (behind thread 3 to eight columns further), and where b = 1 they change places

First numbers of two registers travel as one, and so do second ones: half of the exchanges that whole registers would need, from two threads each.

One block of assembly: Gluon has no such view of a tile, and a way through shared memory costs more than the product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNITS = 8  # of eight columns in a tile


def write_skew(back: bool = False) -> tuple[str, str]:
    """Assembly and constraints: 16 registers out, 16 of columns 0 .. 63 in, and 16 of columns 64 .. 127. back: the other way (unskew)."""
    registers = 2 * UNITS
    first, second = ("f", "e") if back else ("e", "f")  # threads that a thread reads first numbers and second ones from
    lines = [
        "{", ".reg .pred w1, w2, pb, p0, p1;", ".reg .b32 lane, t, a, b, e, f, x, s0, s1, even, odd;",
        f"mov.u32 x, ${3 * registers};", "mov.u32 lane, %laneid;", "and.b32 t, lane, 3;", "and.b32 b, x, 1;", "setp.ne.u32 pb, b, 0;",
        "shr.u32 a, x, 1;", "and.b32 a, a, 3;", "selp.b32 even, 0x1054, 0x5410, pb;", "selp.b32 odd, 0x3276, 0x7632, pb;",
    ]  # fmt: skip
    if back:  # what a thread sends lies in the next eight columns where t < a, t < a + b
        lines += [
            "add.u32 f, a, b;", "setp.gt.u32 p1, a, t;", "setp.gt.u32 p0, f, t;", "add.u32 e, t, a;", "add.u32 f, t, f;",
            "selp.b32 s0, 0x5410, 0x1054, p0;", "selp.b32 s1, 0x7632, 0x3276, p1;",
        ]  # fmt: skip
    else:
        lines += [
            "add.u32 e, t, a;", "add.u32 f, e, b;", "setp.gt.u32 p0, e, 3;", "setp.gt.u32 p1, f, 3;", "sub.u32 e, t, a;", "sub.u32 f, e, b;",
            "selp.b32 s0, 0x1054, 0x5410, p0;", "selp.b32 s1, 0x3276, 0x7632, p1;",
        ]  # fmt: skip
    lines += [
        "and.b32 e, e, 3;", "and.b32 f, f, 3;", "and.b32 t, lane, 28;", "or.b32 e, e, t;", "or.b32 f, f, t;",
        "and.b32 t, x, 16;", "setp.ne.u32 w1, t, 0;", "and.b32 t, x, 32;", "setp.ne.u32 w2, t, 0;",
    ]  # fmt: skip
    way = 1 if back else -1
    lines += [f".reg .b32 {x}{number};" for x in "zyuv" for number in range(UNITS)]
    lines += [f".reg .b32 {x}{h}_{unit};" for x in "rw" for h in range(2) for unit in range(2 * UNITS)]
    for h in range(2):

        def band(unit: int, h: int = h) -> str:
            return f"${registers + unit // UNITS * registers + unit % UNITS * 2 + h}"

        begin = h if back else UNITS - h  # the unit that a warp's first unit is made of, before its shift by 16 w
        units = range(begin, begin + UNITS + 1) if back else range(begin - 1, begin + UNITS)
        for unit in sorted({*units, *(unit + 4 * way for unit in units)}):  # shifted by two units in odd warps
            if 0 <= unit + 2 * way < 2 * UNITS:
                lines.append(f"selp.b32 r{h}_{unit}, {band(unit + 2 * way)}, {band(unit)}, w1;")
        lines += [
            f"selp.b32 w{h}_{unit}, r{h}_{unit + 4 * way}, r{h}_{unit}, w2;" for unit in units
        ]  # and by four in the last two
        for pair in range(UNITS // 2):
            here = begin + 2 * pair + back  # of the pair's units and the one beside them, that which is always sent
            beside = f"w{h}_{here + 1}", f"w{h}_{here - 1}"
            for kind, letter in enumerate("zy"):
                z = f"{letter}{UNITS // 2 * h + pair}"
                lines.append(f"selp.b32 {z}, {beside[not back]}, {beside[back]}, p{kind};")
                lines.append(f"prmt.b32 {z}, w{h}_{here}, {z}, s{kind};")
    for number in range(UNITS):
        lines.append(f"shfl.sync.idx.b32 u{number}, z{number}, {first}, 31, 0xffffffff;")
        lines.append(f"shfl.sync.idx.b32 v{number}, y{number}, {second}, 31, 0xffffffff;")
    for number in range(UNITS):
        h, pair = divmod(number, UNITS // 2)
        lines.append(f"prmt.b32 ${4 * pair + h}, u{number}, v{number}, even;")
        lines.append(f"prmt.b32 ${4 * pair + 2 + h}, u{number}, v{number}, odd;")
    lines.append("}")
    return "\n".join(lines), ",".join(["=r"] * registers + ["r"] * 4 * registers)


_TEXT, _CONSTRAINTS = write_skew()
SKEW = gl.constexpr(_TEXT)
UNSKEW = gl.constexpr(write_skew(back=True)[0])
SKEW_CONSTRAINTS = gl.constexpr(_CONSTRAINTS)


@gluon.jit
def skew(before, after):
    """[64, 64] each, in 16 bits and in the layout of a product: the band's columns 0 .. 63 and 64 .. 127 -> the tile."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, before.type.layout)), 1)
    return gl.inline_asm_elementwise(
        SKEW, SKEW_CONSTRAINTS, [before, after, row], dtype=before.dtype, is_pure=True, pack=32
    )


@gluon.jit
def unskew(before, after):
    """The way back, of a gradient: two neighbouring tiles [64, 64] by query and key -> out[i, c] = [before, after][i, c + i], by query and distance."""
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, before.type.layout)), 1)
    return gl.inline_asm_elementwise(
        UNSKEW, SKEW_CONSTRAINTS, [before, after, row], dtype=before.dtype, is_pure=True, pack=32
    )
