"""Pictures agree with the formulas."""

import pytest

from posenc.cli import pictures, show
from posenc.core import formulas
from posenc.encodings.registry import ENCODINGS, OWN_ATTENTION


def options(name, **given):
    return pictures.Options({**show.read_source({**ENCODINGS, **OWN_ATTENTION}[name]).defaults, **given})


@pytest.mark.parametrize("name", sorted(pictures.PICTURES))
def test_every_picture_belongs_to_an_encoding_and_can_be_drawn_from_its_defaults(name):
    assert name in ENCODINGS or name in OWN_ATTENTION
    assert pictures.draw(name, options(name))


@pytest.mark.parametrize("causal", [False, True])
def test_t5_lists_the_bucket_of_every_range(causal):
    text = "\n".join(pictures.draw("t5", options("t5", causal=causal)))
    expected = ["16→16", "19–20→17", "113+→31"] if causal else ["8–11→8", "64–90→14", "91+→15", "91+→31", "1→17"]
    for phrase in expected:
        distance, bucket = phrase.split("→")
        first = int(distance.rstrip("+").split("–")[0])
        signs = {formulas.t5_bucket(s * first, buckets=32, max_distance=128, causal=causal) for s in (-1, 1)}
        assert int(bucket) in signs
        assert phrase in text or phrase.startswith("16→16")
    assert ("keys after" in text) is not causal


def test_alibi_lists_the_slopes_of_the_formula():
    text = "\n".join(pictures.draw("alibi", options("alibi", heads=12)))
    assert f"head 1: m = {formulas.alibi_slopes(12)[0]:.4g}" in text
    assert f"head 12: m = {formulas.alibi_slopes(12)[-1]:.4g}" in text


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 64])
def test_alibi_draws_any_number_of_heads(heads):
    assert f"of {heads} heads" in pictures.draw("alibi", options("alibi", heads=heads))[0]


def test_rope_lists_its_wavelengths():
    text = "\n".join(pictures.draw("rope", options("rope", head_dim=64)))
    assert "6.28 (pair 0)" in text
    with pytest.raises(ValueError, match="even, got 7"):
        pictures.draw("rope", options("rope", head_dim=7))


def test_runs_of_single_distances_are_abbreviated():
    assert pictures._ranges([(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]) == "0→0 … 1→1, 2–3→2, 4+→3"
    assert pictures._ranges([(1, 5)]) == "1→5"
