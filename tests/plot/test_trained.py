"""Trained tables of the figures: their origin, the options they fit, and what figures say about all others."""

import math

import numpy as np
import pytest
import torch

import posenc
from posenc.plot import analysis, panels, trained


def test_the_file_names_its_origin_and_stays_small():
    origin = trained.origin()
    assert origin["made_by"] == "python docs/trained_tables.py"
    assert {"text", "text_digest", "steps", "batch", "length", "width", "heads", "layers", "seed", "torch"} <= set(
        origin
    )
    assert set(trained._file()["encodings"]) == set(trained.NAMES)
    for name in trained.NAMES:  # better than the loss of guessing by frequency, about 3.3 nats a byte
        assert trained._file()["encodings"][name]["loss"] < 1.5
    assert len(str(trained._file())) < 60_000


@pytest.mark.parametrize("name", trained.NAMES)
def test_trained_biases_decay_with_distance(name):
    """Near keys get more than far ones in every head: the shape that an untrained table does not have."""
    over = analysis.over_distance(analysis.subject(name), torch.tensor([-1, -2, 1, 2, -60, -80, 60, 80]))
    assert (over[:, :4].amax(1) > over[:, 4:].amax(1) + 0.5).all()
    assert analysis.subject(name).tables == "trained"


def test_the_default_options_have_the_trained_rows():
    encoding = analysis.subject("t5").encoding
    index, table = trained._rows("t5")
    used = sorted({int(index.lookup(torch.tensor(r))) for r in range(-128, 129)})
    np.testing.assert_allclose(encoding.table.detach()[used], table[used], atol=1e-6)
    shaw = analysis.subject("shaw", max_distance=64)
    np.testing.assert_allclose(shaw.encoding.keys[0].detach(), trained._rows("shaw")[1], atol=1e-6)
    r = torch.arange(-70, 71)
    rows = trained._rows("shaw")[1][r.clamp(-64, 64) + 64]
    wanted = trained.queries("shaw") @ rows.t() / math.sqrt(16)  # the mean query · a row / sqrt(d)
    np.testing.assert_allclose(analysis.over_distance(shaw, r, at=70), wanted, atol=1e-6)


def test_other_options_regroup_the_distances():
    full, short = (analysis.subject("clipped", max_distance=n) for n in (64, 4))
    r = torch.arange(-3, 4)
    np.testing.assert_allclose(analysis.over_distance(full, r), analysis.over_distance(short, r), atol=1e-6)
    edge = analysis.over_distance(full, torch.arange(4, 65)).mean(1)  # the last row is the mean of all that read it
    np.testing.assert_allclose(analysis.over_distance(short, torch.tensor([9]))[:, 0], edge, atol=1e-6)
    causal = analysis.subject("t5", causal=True)
    np.testing.assert_allclose(
        analysis.over_distance(causal, torch.tensor([-1, 0])),
        analysis.over_distance(analysis.subject("t5"), torch.tensor([-1, 0])),
        atol=1e-6,
    )
    zero = analysis.subject("shaw", outside="zero", max_distance=4)
    assert (analysis.over_distance(zero, torch.tensor([-5, 5])) == 0).all()


def test_figures_say_whether_tables_are_trained():
    def title(name, **options):
        return panels.distance(analysis.subject(name, **options), 8)[0].title

    assert title("t5").startswith("t5 (trained):") and title("clipped").startswith("clipped (trained):")
    for name, options in (("t5", {"std": 0.1}), ("t5", {"heads": 4}), ("shaw", {"per_head": True}), ("deberta", {})):
        assert title(name, **options).startswith(f"{name} (untrained):"), (name, options)
    for name in ("alibi", "rope", "sinusoidal", "none"):
        assert title(name).startswith(f"{name}:")
    assert title(posenc.T5(heads=2)).startswith("t5:")  # the caller's own


def test_xpos_is_drawn_around_its_centre_and_for_the_past():
    subject = analysis.subject("xpos")
    vectors = analysis.encoding(subject, 96)
    norms = vectors.rows.square().sum(1).sqrt()  # of the keys: factors of 1 in the middle, no power of e elsewhere
    assert norms[48] == pytest.approx(math.sqrt(32), rel=1e-6) and norms.max() < 1.2 * norms.min()
    z, at, relative = analysis.similarity(subject, 96)
    assert not relative and list(at) == list(range(96))
    np.testing.assert_allclose(z.diagonal(), 1.0, atol=1e-6)
    assert z[3, 4].isnan() and not z[4, 3].isnan()
    kernel = analysis.kernel(subject, at, at, 0)[0]  # the score, up to its scale: 64 channels of ones / sqrt(64)
    np.testing.assert_allclose(kernel / kernel[0, 0], z, atol=1e-5)
    assert panels.distance(subject, 8)[0].x.max() == 0
