"""Tensors come with any strides (convolutions, transposed projections, expanded batches); no engine may care."""

import pytest
import torch

import posenc
from tests import layouts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("engine", [name for name in posenc.ENGINES if name != "reference"])
@pytest.mark.parametrize("name", layouts.ENCODINGS)
@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_strides_do_not_matter(engine, name, which, layout):
    try:
        layouts.check(engine, name, which, layout, DEVICE)
    except posenc.UnsupportedPlan as refused:
        pytest.skip(str(refused))
