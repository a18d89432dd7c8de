import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Four processes; groups of 1 to 4 of them."""
    four = Ranks(4)
    yield four
    four.close()
