"""Attention over a sequence that 2, 3 or 4 processes share against one process: outputs, log-sum-exps and all gradients."""

import pytest
import torch

from posenc.parallel.layout import BALANCES, Segment, restore_order, slots_of, take_order, unit, visible_part
from tests.parallel import cases

STRATEGIES = ("ulysses", "gather", "ring")


def grid(encodings, strategies, balances, masks, **options):
    return [(e, s, b, m, options) for e in encodings for s in strategies for b in balances for m in masks]


def test_every_encoding_and_strategy_on_two_ranks(ranks):
    ranks.run(cases.compare_all, 2, grid(cases.ENCODINGS, STRATEGIES, ("zigzag",), ("causal",)), 1e-10)


def test_every_mask_strategy_and_balance_on_two_ranks(ranks):
    ranks.run(cases.compare_all, 2, grid(("t5",), STRATEGIES, BALANCES, cases.MASKS), 1e-10)


def test_three_ranks(ranks):
    some = ("deberta", "xlnet")
    ranks.run(cases.compare_all, 3, grid(some, STRATEGIES, ("none", "striped"), ("open", "all")), 1e-10)


def test_four_ranks(ranks):
    ranks.run(cases.compare_all, 4, grid(("shaw per head", "rope"), STRATEGIES, ("zigzag",), ("all",)), 1e-10)


def test_float32(ranks):
    options = {"dtype": torch.float32}
    ranks.run(cases.compare_all, 2, grid(cases.ENCODINGS, STRATEGIES, ("zigzag",), ("causal",), **options), 1e-5)


def test_fewer_key_heads(ranks):
    for kv_heads in (1, 2, 6):
        some = grid(("t5", "deberta"), STRATEGIES, ("none",), ("causal",), kv_heads=kv_heads)
        ranks.run(cases.compare_all, 2, some, 1e-10)


def test_explicit_positions(ranks):
    for kind in ("jump", "shift"):
        some = grid(("t5", "rope", "xlnet", "shaw"), STRATEGIES, ("zigzag",), ("causal",), positions=kind)
        ranks.run(cases.compare_all, 3, some, 1e-10)


def test_pairs_of_pieces_beyond_the_span_are_plain_attention(ranks):
    some = grid(
        ("t5", "clipped", "shaw", "shaw per head", "deberta"), ("ring",), ("none", "zigzag"), ("open",), length=96
    )
    ranks.run(cases.compare_all, 2, some, 1e-10)
    assert ranks.run(cases.count_far_blocks, 2) == [2, 1]  # chunks 3-0, 3-1; 2-0


def test_dropout_drops_what_one_process_drops(ranks):
    some = [
        (e, s, b, "blocked")
        for e in ("none", "shaw", "transformer_xl")
        for s, b in zip(STRATEGIES, BALANCES[::-1], strict=True)
    ]
    ranks.run(cases.compare_dropouts, 3, some)


def test_the_same_call_gives_the_same_bits(ranks):
    for strategy in STRATEGIES:
        assert all(ranks.run(cases.repeats, 4, strategy))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "balance"), [(2, "zigzag"), (3, "none"), (4, "striped")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_encoding_strategy_and_mask(ranks, strategy, size, balance):
    masks = cases.MASKS if size < 4 else ("open", "causal", "short window", "all")
    ranks.run(cases.compare_all, size, grid(cases.ENCODINGS, (strategy,), (balance,), masks), 1e-10)


# ---- layouts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_orders_are_inverse_and_those_of_the_slots(balance, size):
    length = 3 * unit(size, balance)
    sequence = torch.arange(length)[None]
    ranks = torch.cat([slots_of(rank, size, length // size, balance) for rank in range(size)])[None]
    assert torch.equal(restore_order(ranks, size, balance, 1), sequence)
    assert torch.equal(take_order(sequence, size, balance, 1), ranks)


def test_the_visible_part_of_two_pieces_is_what_the_mask_of_slots_leaves():
    from posenc.core.mask import Mask, make_window

    draw = torch.Generator().manual_seed(0)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    for _ in range(2000):
        step = number(1, 4)
        q, k = (Segment(number(0, 13), step, number(1, 7), 0) for _ in range(2))
        left, right = ((None, 0, 1, 3, 7)[number(0, 5)] for _ in range(2))
        i, j = (torch.arange(s.length) * step + s.start for s in (q, k))
        slots = j - i[:, None]
        wanted = (slots >= (-100 if left is None else -left)) & (slots <= (100 if right is None else right))
        found = torch.zeros_like(wanted)
        part = visible_part(q, k, left, right)
        if part is not None:
            block = found[part.queries, part.keys]
            window = None if part.window is None else make_window(part.window)
            allowed = Mask(window=window).allowed(*block.shape, "cpu")
            block.copy_(torch.ones_like(block) if allowed is None else allowed)
            assert block.any()
        assert torch.equal(found, wanted)
