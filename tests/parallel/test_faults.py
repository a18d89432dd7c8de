"""A rank that dies, hangs or holds another length: the others end with a message, within the time limit."""

import os
import time

import pytest
import torch

import posenc
from posenc import parallel
from tests.parallel.ranks import Ranks


@pytest.fixture
def three():
    made = Ranks(3)
    yield made
    made.close()


def attend_once(group, strategy, fault, backward):
    """The message of the error that this rank raises, and after how many seconds."""
    cp = parallel.ContextParallel(group, strategy=strategy, timeout=100.0)  # for what is to work on a busy machine too
    encoding = posenc.create("t5", heads=6)
    q = torch.randn(1, 6, 8, 4, requires_grad=True)
    out = parallel.attend(q, q, q, encoding, context_parallel=cp)
    if not backward:
        out.sum().backward()
    torch.distributed.barrier(cp.group)  # of ranks that one after another are ready, the first would wait too long
    cp.timeout = 2.0
    if cp.rank == 1 and fault == "dies":
        os._exit(1)
    if cp.rank == 1:
        time.sleep(60.0)
    began = time.monotonic()
    try:
        if backward:
            out.sum().backward()
        else:
            parallel.attend(q, q, q, encoding, context_parallel=cp)
    except parallel.ParallelError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize(
    ("strategy", "backward"),
    [("ring", True), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("ulysses", False), ("gather", True)))],
)
def test_a_rank_that_dies_ends_the_others(three, strategy, backward):
    for message, seconds in three.run(attend_once, 3, strategy, "dies", backward, dies=(1,)):
        assert message.startswith("rank ") and "failed after" in message, message
        assert "Another rank ended, takes another path, or holds another length" in message
        assert seconds < 12.0


def test_a_rank_that_hangs_ends_the_others_within_the_limit(three):
    for message, seconds in three.run(attend_once, 3, "ring", "hangs", False, dies=(1,)):
        assert "(limit 2 s)" in message
        assert seconds < 12.0
