"""Bytes that a rank sends and holds against the formulas of docs.site.parallel_estimate: counted, not timed."""

import pytest

from docs.site.parallel_estimate import ring_buffers, traffic
from tests.parallel import counted
from tests.parallel.ranks import Ranks

SIZES = dict(batch=counted.BATCH, heads=counted.HEADS, head_dim=counted.SIZE, number=4)
KINDS = {"ulysses": ("all_to_all", "all_to_all"), "gather": ("all_gather", "all_to_all"), "ring": ("ring", "ring")}


@pytest.fixture(scope="module")
def eight():
    made = Ranks(8)
    yield made
    made.close()


def check_traffic(ranks, size, strategy, kv_heads):
    options = {"memory": False, "kv_heads": kv_heads}
    wanted = traffic(strategy, size, local=16, kv_heads=kv_heads, **SIZES)
    for forward, backward, _ in ranks.run(counted.count, size, strategy, "zigzag", 16, "t5", options):
        kinds = KINDS[strategy]
        assert (forward.pop(kinds[0]), backward.pop(kinds[1])) == wanted
        # beside keys, values and heads: a few numbers that are compared, and the table's gradient, once
        assert set(forward) == {"check"}
        assert backward == {"all_reduce": 2 * (size - 1) * 32 * counted.HEADS * 4 // size}


@pytest.mark.parametrize("strategy", KINDS)
def test_bytes_sent_on_two_and_four_ranks(ranks, strategy):
    for size in (2, 4):
        check_traffic(ranks, size, strategy, 8)
    check_traffic(ranks, 4, strategy, 2)


def test_the_ring_ends_where_a_causal_window_does(ranks):
    """A window that reaches two ranks back: two parts are sent, and the sums of their gradients two ranks home."""
    part = 2 * counted.BATCH * 16 * counted.HEADS * counted.SIZE * 4
    options = {"memory": False, "causal": True, "window": 17}
    for forward, backward, _ in ranks.run(counted.count, 4, "ring", "none", 16, "t5", options):
        assert forward["ring"] == 2 * part
        assert backward["ring"] == 2 * part + 3 * part


@pytest.mark.slow
def test_bytes_sent_on_eight_ranks(eight):
    for strategy in KINDS:
        check_traffic(eight, 8, strategy, 8)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["t5", "transformer_xl"])
def test_the_memory_of_the_ring_depends_on_its_own_tokens_alone(eight, encoding):
    """The same number of tokens on each of 2, 4 and 8 ranks: a sequence four times as long."""
    local = 256
    block = counted.block_peak(local, encoding)
    buffers = ring_buffers(local=local, **SIZES)
    if encoding == "transformer_xl":  # a pair's own table: sinusoids, rows, rows made again and their gradient
        buffers += 4 * 2 * local * counted.HEADS * counted.SIZE * 4
    peaks = []
    for size in (2, 4, 8):
        found = eight.run(counted.count, size, "ring", "none", local, encoding, {})
        peaks.append(max(peak for _, _, peak in found))
    assert max(peaks) <= block + buffers + counted.SLACK, (peaks, block, buffers)
    assert peaks[2] <= peaks[1] * 1.01  # two ranks have no part that is neither their own nor the next one's


@pytest.mark.slow
def test_gathered_keys_grow_with_the_sequence(eight):
    """Keys, values and their gradients of all ranks: at least 4 N parts, where the ring holds a number that is fixed."""
    peaks = [eight.run(counted.count, n, "gather", "none", 256, "none", {})[0][2] for n in (2, 8)]
    part = counted.BATCH * counted.HEADS * 256 * counted.SIZE * 4
    assert peaks[1] - peaks[0] >= 4 * 6 * part * 0.9


def test_the_tables_of_the_document_are_the_formulas():
    from pathlib import Path

    from docs.site.parallel_estimate import table

    document = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    assert f"<!-- estimate:start -->\n{table()}\n<!-- estimate:end -->" in document
