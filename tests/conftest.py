"""What every test shares: a fixed seed, no GPU tests without a GPU, hypothesis that draws the same examples each run."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("posenc", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile("posenc")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
