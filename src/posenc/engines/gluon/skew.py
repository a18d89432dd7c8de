"""Skew a band within the registers of a warpgroup: out[i, j] = band[i, j - i + 64] for a tile of 64 queries and 64 keys.

A product of queries with the table's rows gives a number for each query i and distance; a tile of scores needs them by query and key. In the
layout of a product's result a row lies in four neighbouring threads of a warp, each with two of every eight columns:

    row 16 w + 8 h + s          w: the warp    h: 0 or 1, its registers    s = lane // 4, t = lane % 4
    column 8 u + 2 t, + 1       one register of two numbers for each h and u: register 2 u + h

So the shift by i = 16 w + 8 h + s columns is

    by 16 w       2 w registers further: two selections by the bits of w
    by 8 h        one register further: known when compiled
    by s          within the four threads of a row, s = 2 a + b: each reads the registers of the threads t - a and t - a - 1 (those before
                  thread 0 are of the eight columns before), and joins halves of both where b = 1

One block of assembly: Gluon has no such view of a tile, and a way through shared memory costs more than the product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNITS = 8  # of eight columns in a tile


def write_skew(back: bool = False) -> tuple[str, str]:
    """Assembly and constraints: 16 registers out, 16 of columns 0 .. 63 in, and 16 of columns 64 .. 127. back: the other way (unskew)."""
    registers = 2 * UNITS
    way = 1 if back else -1
    lines = [
        "{", ".reg .pred pw1, pw2, pe, pf, pb;", ".reg .b32 lane, t, a, e, f, sel, x;",
        f"mov.u32 x, ${3 * registers};", "mov.u32 lane, %laneid;", "and.b32 t, lane, 3;",
        "and.b32 e, x, 16;", "setp.ne.u32 pw1, e, 0;", "and.b32 e, x, 32;", "setp.ne.u32 pw2, e, 0;",
        "and.b32 e, x, 1;", "setp.ne.u32 pb, e, 0;", f"selp.b32 sel, 0x5432, {'0x3210' if back else '0x7654'}, pb;",
        "shr.u32 a, x, 1;", "and.b32 a, a, 3;",
    ]  # fmt: skip
    if back:
        lines += ["add.u32 e, t, a;", "setp.gt.u32 pe, 4, e;", "setp.gt.u32 pf, 3, e;", "add.u32 f, e, 1;"]
    else:
        lines += ["setp.ge.u32 pe, t, a;", "setp.gt.u32 pf, t, a;", "sub.u32 e, t, a;", "sub.u32 f, e, 1;"]
    lines += [
        "and.b32 e, e, 3;", "and.b32 f, f, 3;", "and.b32 x, lane, 28;", "or.b32 e, e, x;", "or.b32 f, f, x;",
    ]  # fmt: skip
    made: set[str] = set()

    def new(name: str, kind: str = "b32") -> str:
        if name not in made:
            made.add(name)
            lines.append(f".reg .{kind} {name};")
        return name

    for h in range(2):

        def band(unit: int, h: int = h) -> str:
            return f"${registers + unit // UNITS * registers + unit % UNITS * 2 + h}"

        begin = h if back else UNITS - h  # the unit that a warp's first unit is made of, before its shift by 16 w
        units = range(begin, begin + UNITS + 1) if back else range(begin - 1, begin + UNITS)
        for unit in sorted({*units, *(unit + 4 * way for unit in units)}):  # shifted by two units in odd warps
            if 0 <= unit + 2 * way < 2 * UNITS:
                lines.append(f"selp.b32 {new(f'v{h}_{unit}')}, {band(unit + 2 * way)}, {band(unit)}, pw1;")
        for unit in units:  # and by four in the last two
            lines.append(f"selp.b32 {new(f'w{h}_{unit}')}, v{h}_{unit + 4 * way}, v{h}_{unit}, pw2;")
            lines.append(f"shfl.sync.idx.b32 {new(f'e{h}_{unit}')}, w{h}_{unit}, e, 31, 0xffffffff;")
            lines.append(f"shfl.sync.idx.b32 {new(f'f{h}_{unit}')}, w{h}_{unit}, f, 31, 0xffffffff;")
        for unit in range(UNITS):
            here = begin + unit
            lines.append(f"selp.b32 {new(f'p{h}_{unit}')}, e{h}_{here}, e{h}_{here + way}, pe;")
            lines.append(f"selp.b32 {new(f'q{h}_{unit}')}, f{h}_{here}, f{h}_{here + way}, pf;")
    for h in range(2):
        for unit in range(UNITS):
            pair = (f"p{h}_{unit}", f"q{h}_{unit}")
            first, second = pair if back else pair[::-1]
            lines.append(f"prmt.b32 ${2 * unit + h}, {first}, {second}, sel;")
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
