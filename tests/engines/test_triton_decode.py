"""The triton engine's decoding kernels: interpreted (triton_decode_cases.py), and how keys are shared out."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from posenc.engines.triton import decode_schedule
from posenc.engines.triton.decode_schedule import MOST_SHARES, choose_decode_shares, choose_decode_tile, count_shares
from tests.engines.groups import check_group, list_groups

CASES = Path(__file__).with_name("triton_decode_cases.py")
QUICK = {"steps"}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("group", list_groups(CASES, QUICK))
def test_the_decoding_kernels_agree_with_the_reference(group):
    check_group(CASES, group, 600)


def test_keys_are_shared_out_to_fill_the_device_and_no_further():
    slots = 264  # an H200 with two programs on each multiprocessor
    assert count_shares(8, 16, slots) == 16  # one text: as many as there are tiles
    assert count_shares(128, 64, slots) == 2  # 256 programs at once
    assert count_shares(512, 128, slots) == 1  # two waves already
    assert count_shares(4096, 3, slots) == 1
    for programs, tiles in ((1, 1), (1, 10_000), (7, 13), (300, 50)):
        shares = count_shares(programs, tiles, slots)
        assert 1 <= shares <= min(tiles, MOST_SHARES)


@pytest.mark.parametrize(
    ("heads", "group", "keys", "size", "tile", "shares"),
    [
        (1 * 8, 4, 1024, 128, (64, 4, 3), 16),
        (16 * 8, 4, 4096, 128, (128, 8, 3), 1),
        (64 * 8, 4, 8192, 128, (128, 8, 3), 1),
        (8 * 12, 1, 512, 64, (128, 4, 3), 1),
    ],
)
def test_the_schedule_is_the_best_of_the_sweep_on_an_h200(monkeypatch, heads, group, keys, size, tile, shares):
    monkeypatch.setattr(decode_schedule, "capability", lambda device: (9, 0))
    monkeypatch.setattr(decode_schedule, "processors", lambda device: 132)
    device = torch.device("cuda", 0)
    chosen = choose_decode_tile.__wrapped__(group, size, torch.bfloat16, device, heads)
    assert (chosen.rows, chosen.keys, chosen.warps, chosen.stages) == (16, *tile)
    assert choose_decode_shares(heads, keys, chosen, device) == shares
