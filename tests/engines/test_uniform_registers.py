"""The data flow that looks for registers which ptxas forgot to set."""

import pytest

pytest.importorskip("triton")

from tests.gpu.uniform_registers import find_unset

SKIPPED = """
UMOV UR4, 0x10
ISETP.NE.AND P0, PT, R0, RZ, PT
@!P0 BRA 0x50
UIADD3 UR6, UR4, 0x2, URZ
UMOV UR7, 0x40000040
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24
EXIT
"""


def lines(code):
    return [(16 * number, text) for number, text in enumerate(code.strip().splitlines())]


def test_what_only_one_path_sets_is_found():
    found = find_unset(lines(SKIPPED))
    assert found == [f"UR{x} may not be set at 50: HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24" for x in (5, 6, 7)]


def test_what_both_paths_set_is_right():
    both = SKIPPED.replace("UMOV UR4, 0x10", "UIMAD.WIDE UR4, UR1, 0x3, URZ").replace("@!P0 BRA 0x50", "@!P0 BRA 0x30")
    assert find_unset(lines(both)) == ["UR1 may not be set at 0: UIMAD.WIDE UR4, UR1, 0x3, URZ"]


def test_an_operand_in_registers_has_no_descriptor():
    code = SKIPPED.replace("R24, gdesc[UR4]", "R24, R8, gdesc[UR4]")
    assert [x[:3] for x in find_unset(lines(code))] == ["UR6", "UR7"]
    assert find_unset(lines("@P2 R2UR P1, UR6, R4\nUIADD3 UR7, UR6, 0x2, URZ")) == []
