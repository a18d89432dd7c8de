"""The assembly of gluon/skew.py and gluon/backward_diagonals.py, interpreted: 128 threads."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc.engines.gluon import backward_diagonals, skew
from tests.engines import gluon_emulator

OPERATIONS = {
    "mov.u32": lambda a: a, "mov.b32": lambda a: a, "add.u32": lambda a, b: a + b, "add.f32": lambda a, b: a + b, "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b, "setp.eq.u32": lambda a, b: a == b, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "shr.u32": lambda a, b: a >> b,
    "sub.u32": lambda a, b: (a - b) % 2**32, "setp.ne.u32": lambda a, b: a != b, "setp.ge.u32": lambda a, b: a >= b,
    "setp.gt.u32": lambda a, b: a > b, "selp.b32": lambda a, b, p: a if p else b,
    "prmt.b32": lambda a, b, select: sum(((b << 32 | a) >> 8 * (select >> 4 * i & 7) & 255) << 8 * i for i in range(4)),
}  # fmt: skip


def places(thread):
    """(register of the first chunk, row, column) of a thread's pairs of columns, in the layout of a product's result."""
    warp, lane = divmod(thread, 32)
    for unit in range(8):
        for half in range(2):
            yield 2 * unit + half, 16 * warp + 8 * half + lane // 4, 8 * unit + 2 * (lane % 4)


def run(text, threads):
    for line in text.splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        name, rest = line.rstrip(";").split(" ", 1)
        into, *given = (part.strip() for part in rest.split(","))
        read = lambda own, x: own[x] if x in own else int(x, 0)  # noqa: E731
        if name == "shfl.sync.idx.b32":
            values = [own[given[0]] for own in threads]
            for at, own in enumerate(threads):
                own[into] = values[at // 32 * 32 + own[given[1]]]
        else:
            for own in threads:
                own[into] = OPERATIONS[name](*(read(own, x) for x in given))


@pytest.mark.parametrize("back", [False, True])
def test_it_skews_a_band(back):
    """With a number of its own for each element of the band."""
    text, constraints = skew.write_skew(back)
    element = lambda row, column: 128 * row + column  # noqa: E731
    threads = []
    for thread in range(128):
        own = {"%laneid": thread % 32}
        for register, row, column in places(thread):
            own[f"${48 + 2 * register}"] = own[f"${49 + 2 * register}"] = row
            for chunk in range(2):
                first = element(row, 64 * chunk + column)
                own[f"${16 + 16 * chunk + register}"] = first | (first + 1) << 16
        threads.append(own)
    run(text, threads)
    for thread, own in enumerate(threads):
        for register, row, column in places(thread):
            expected = element(row, column + row if back else column - row + 64)
            assert own[f"${register}"] == expected | (expected + 1) << 16
    assert constraints.split(",") == ["=r"] * 16 + ["r"] * 64


@pytest.mark.parametrize("eights", [4, 8])
def test_it_sums_diagonals(eights):
    """Each distance of a warp's rows once, where the emulator has it; all numbers are whole."""
    text, constraints = backward_diagonals.write_sums(eights)
    tile = torch.randint(-1000, 1000, (64, eights, 8))
    count = 4 * eights
    threads = []
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        own = {"%laneid": lane}
        for e in range(eights):
            for h in range(2):
                for p in range(2):
                    own[f"${count + p + 2 * h + 4 * e}"] = int(
                        tile[16 * warp + 8 * h + lane // 4, e, 2 * (lane % 4) + p]
                    )
        threads.append(own)
    run(text, threads)
    expected = gluon_emulator._sum_diagonals(tile.float()).view(torch.float32)
    for thread, own in enumerate(threads):
        warp, lane = divmod(thread, 32)
        for at in range(count):
            row, column = 16 * warp + 8 * (at // 2 % 2) + lane // 4, 2 * (lane % 4) + at % 2
            assert own[f"${at}"] == expected[row, at // 4, column]
    assert expected.sum() == tile.sum()
    assert constraints.split(",") == ["=r"] * count + ["f"] * count
