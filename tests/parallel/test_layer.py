"""Attention(context_parallel=...), batches cut and put back, FSDP2 and tensor parallelism: against one process."""

import pytest
import torch

from tests.parallel import cases, layers


@pytest.mark.parametrize("strategy", ["ulysses", "gather", "ring"])
def test_every_kind_of_layer(ranks, strategy):
    ranks.run(cases.compare_layers, 2, [(name, strategy, "zigzag") for name in cases.LAYERS])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "balance"), [(3, "none"), (4, "striped")])
@pytest.mark.parametrize("strategy", ["ulysses", "gather", "ring"])
def test_every_kind_of_layer_on_more_ranks(ranks, strategy, size, balance):
    names = [name for name in cases.LAYERS if (strategy, size) != ("ulysses", 3) or name != "rope packed"]
    ranks.run(cases.compare_layers, size, [(name, strategy, balance) for name in names])


def test_autocast_is_that_of_the_forward_pass(ranks):
    ranks.run(layers.autocast, 2)


def test_a_part_is_sent_while_another_is_computed(ranks):
    assert ranks.run(layers.order_of_a_ring, 3) == [["send", "block", "wait", "send", "block", "wait", "block"]] * 3


def test_batches_are_cut_and_put_back(ranks):
    ranks.run(layers.cut_and_put_back, 3)


def test_a_packed_padded_batch_gives_the_same_loss_and_gradients(ranks):
    ranks.run(layers.train_packed, 3)


def test_tensor_parallelism_over_heads(ranks):
    ranks.run(layers.tensor_parallel, 4, ("t5", "shaw", "relative_logits", "transformer_xl", "alibi"))


def test_fsdp2_and_tensor_parallelism_on_one_mesh(ranks):
    ranks.run(layers.fsdp_and_tensor_parallel, 4)


def test_a_checkpoint_of_some_ranks_loads_on_others(ranks, tmp_path):
    ranks.run(layers.save_checkpoint, 4, str(tmp_path))
    found = [*ranks.run(layers.load_checkpoint, 2, str(tmp_path)), *ranks.run(layers.load_checkpoint, 1, str(tmp_path))]
    assert all(torch.equal(found[0], x) for x in found)


def test_what_cannot_be_shared_is_refused(ranks):
    ranks.run(layers.refusals, 2)
