"""What every test shares: seeds of its own (tests/seeds.py), and no GPU tests without a GPU."""

import hypothesis
import pytest
import torch

from tests import seeds

hypothesis.settings.register_profile("posenc", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posenc")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
        if seeds.OFFSET and hypothesis.is_hypothesis_test(item.obj):
            hypothesis.seed(seeds.of(item.nodeid))(item.obj)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is drawn with a seed of its own, whichever of them comes first in this process."""
    if fixturedef.scope != "function":
        seeds.everything(seeds.of(f"{fixturedef.baseid}::{fixturedef.argname}"))


@pytest.fixture(autouse=True)
def seed(request):
    """The numbers of a test depend on its name and POSENC_SEED, not on the tests before it."""
    seeds.everything(seeds.of(request.node.nodeid))
