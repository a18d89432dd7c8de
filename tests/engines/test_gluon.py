"""The Gluon kernel without a GPU: its source in an emulator (tests/engines/gluon_emulator.py), and where it is chosen."""

import types

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from posenc import Lookup, Plan, Positions, index
from posenc.core.mask import make_mask
from posenc.engines.gluon import launch as gluon_launch
from posenc.engines.lowering import lower_plan
from posenc.engines.triton.arguments import kernel_arguments
from tests import budget
from tests.engines import gluon_emulator

LOG2E = 1.4426950408889634
TILE = gluon_launch.Tile(3, 128, 2, True, False, (160, 32))


@pytest.fixture(scope="module")
def kernel():
    return gluon_emulator.load()


def emulate(module):
    """A launch(...) as in triton/launcher.py."""

    def launch(called, programs, *args, **constants):
        if called is gluon_launch.pad_bias:
            bias, _, bias_lo, bias_hi, table, first, last, width, scale, causal, _ = args
            r = first + torch.arange(width)
            table.copy_(torch.zeros(width) if bias is None else bias[:, r.clamp(bias_lo, bias_hi) - bias_lo] / scale)
            if causal:
                table[:, r > last] = float("-inf")
            return
        descriptors, pointers, scale, sizes = args[:4], args[4:7], args[7], args[8:]
        constants.pop("num_warps")
        blocks = [(x.base, x.block_shape[2]) for x in descriptors]
        gluon_emulator.launch(module, programs, blocks, pointers, scale, sizes, constants)

    return launch


def run(module, monkeypatch, q, k, v, plan, causal, tile=TILE, programs=3):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=programs)
    )
    inputs, numbers, scale = kernel_arguments(q, k, v, lower_plan(q, k, v, plan, make_mask(q, k, causal=causal)))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((*q.shape[:2], -(-q.shape[2] // 64) * 64), float("nan"))
    with torch.no_grad():
        gluon_launch.run_forward(emulate(module), inputs, numbers, scale, out, lse, tile)
    lse = lse[..., : q.shape[2]]
    return out, torch.where(lse == float("inf"), float("-inf"), lse / LOG2E)


def check(module, monkeypatch, terms, causal, lengths, start=0, heads=(2, 1), batch=1, **options):
    lq, lk = lengths
    q = torch.randn(batch, heads[0], lq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, heads[1], lk, 64, dtype=torch.bfloat16) for _ in range(2))
    spot = {"near": index.clip(300, 200), "apart": index.Index(3, 9)}.get(
        terms, index.log_buckets(32, 64, causal=causal)
    )
    lookups = (Lookup(spot, bias=torch.randn(heads[0], spot.n)),) if terms not in ("none", "slopes") else ()
    slopes = torch.rand(heads[0]) / 8 if terms in ("slopes", "apart") else None
    plan = Plan(Positions((start, lq), lk), lookups=lookups, slopes=slopes)
    out, lse = run(module, monkeypatch, q, k, v, plan, causal, **options)
    expected, allowed = budget.expect(q, k, v, plan, causal=causal)
    budget.assert_within(out, expected["out"], allowed["out"], "out")
    budget.assert_within(lse, expected["lse"], allowed["lse"], "lse")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", ["bias", "none", "slopes", "apart", "near"])
def test_terms(kernel, monkeypatch, terms, causal):
    check(kernel, monkeypatch, terms, causal, (600, 600))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (63, 65), (64, 64), (129, 127), (200, 700), (700, 200), (1, 500)])
def test_lengths(kernel, monkeypatch, lengths, causal):
    check(kernel, monkeypatch, "bias", causal, lengths, start=max(lengths[1] - lengths[0], 0))


@pytest.mark.parametrize(
    "tile",
    [(2, 128, 2, True, True, (240, 24)), (3, 64, 4, False, False, (160, 32)), (3, 128, 3, False, False, (160, 32))],
)
def test_tiles(kernel, monkeypatch, tile):
    check(
        kernel,
        monkeypatch,
        "bias",
        True,
        (400, 450),
        start=7,
        heads=(4, 2),
        batch=2,
        tile=gluon_launch.Tile(*tile),
        programs=5,
    )
