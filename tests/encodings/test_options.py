"""Every option of every encoding with values that make no sense: an OptionError, or an encoding that works."""

import resource
import time

import pytest
import torch

import posenc
from posenc.core.errors import OptionError
from posenc.encodings.randomized import Randomized
from posenc.encodings.registry import ENCODINGS, options_of

SIZES = {"d_model": 16, "heads": 4, "head_dim": 4}
REQUIRED = {
    "learned": {"max_length": 64},
    "axial": {"columns": 4},
    "sinusoidal_2d": {"columns": 4},
    "many_axes": {"axis_of": (0, 1)},
}
JUNK = (None, -1, 0, 2.5, "x", True, 10**12, 10**400, float("nan"), float("inf"), (), (1, 2), [3], torch.zeros(2))
CASES = [(name, option) for name in posenc.list_encodings() for option in options_of(name)]


def build(name, options):
    needed = {size: value for size, value in SIZES.items() if size in options_of(name)}
    return ENCODINGS[name].load()(**{**needed, **REQUIRED.get(name, {}), **options})


def use(encoding):
    """A forward pass at the positions that it reads; relative_logits and xlnet take their input."""
    x = torch.randn(2, 3, getattr(encoding, "d_model", 16))
    positions = posenc.Positions(torch.zeros(2, 3, 2, dtype=torch.int64) if encoding.axes not in (1, None) else 3)
    if type(encoding).__name__ in ("Learned", "Sinusoidal", "Sinusoidal2D", "Cape"):
        encoding.embed(
            torch.randn(2, 3, encoding.table.shape[1] if hasattr(encoding, "table") else encoding.d_model), positions
        )
    elif encoding.axes in (1, None):
        width = encoding.r_proj.in_features if hasattr(encoding, "r_proj") else x.shape[2]
        host = posenc.Attention(16, 4) if getattr(encoding, "projections", "") == "shared" else None
        encoding.plan(positions, x=torch.randn(2, 3, width), host=host)


@pytest.mark.parametrize("name, option", CASES, ids=[f"{name}-{option}" for name, option in CASES])
def test_junk_is_refused_or_works(name, option):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for value in JUNK:
        try:
            encoding = build(name, {option: value})
        except OptionError:
            continue
        use(encoding)
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_junk_is_found():
    """What the test above must not let through."""
    for name, options in (
        ("t5", {"buckets": 100_000_000}), ("clipped", {"max_distance": 100_000_000_000}), ("rope", {"head_dim": 10**12}),
        ("rope", {"base": float("nan")}), ("rope", {"base": float("inf")}), ("rope", {"rotary_dim": 3}),
        ("rope", {"layout": "x"}), ("rope", {"scaling": 2}), ("xpos", {"gamma": -1}), ("xpos", {"max_length": 10**6}),
        ("axial", {"columns": 2.5}), ("mrope", {"sections": (1, 2)}), ("learned", {"max_length": 2.5}),
        ("alibi", {"heads": 2.5}), ("deberta", {"max_distance": 10**9}), ("transformer_xl", {"dropout": 1.0}),
    ):  # fmt: skip
        with pytest.raises(OptionError):
            build(name, options)


@pytest.mark.parametrize(
    "options", [{"max_length": 0}, {"max_length": 2.5}, {"max_length": 10**12}, {"seed": "x"}, {"encoding": 3}]
)
def test_randomized(options):
    given = {"encoding": posenc.create("rope", head_dim=4), "max_length": 8}
    Randomized(**given)
    with pytest.raises(OptionError):
        Randomized(**{**given, **options})
