"""Rotations of consecutive patches are made once, and are those of other options, positions and dtypes only where they agree."""

import torch

import posenc


def test_the_same_patches_share_a_rotation():
    axial = posenc.create("axial", head_dim=32, columns=4)
    first = axial.plan(posenc.Positions(12)).rotate
    assert axial.plan(posenc.Positions(12)).rotate.k[0] is first.k[0]
    others = ({"columns": 6}, {"columns": 4, "base": 100.0})
    for other in (posenc.create("axial", head_dim=32, **options) for options in others):
        assert not torch.equal(other.plan(posenc.Positions(12)).rotate.k[0], first.k[0])
    assert axial.plan(posenc.Positions((4, 8), 12)).rotate.q[0].shape[-2] == 8
    assert axial.double().plan(posenc.Positions(12)).rotate.k[0].dtype == torch.float64


def test_what_was_made_under_inference_mode_serves_training():
    mrope = posenc.create("mrope", head_dim=32)
    with torch.inference_mode():
        mrope.plan(posenc.Positions(7))
    x = torch.randn(1, 2, 7, 32, requires_grad=True)
    posenc.attend(x, x, x, mrope.plan(posenc.Positions(7))).sum().backward()
    assert x.grad is not None
