"""The triton engine on a GPU, at real sizes: `make test-gpu`. The cases are in cases.py, which also runs without pytest."""

import pytest

from tests.gpu.cases import CASES


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    CASES[name]()
