"""Two processes: DistributedDataParallel and fully_shard (FSDP2) over an accelerated model."""

import pytest
import torch

from tests.hf.uses.tiny import FAMILIES, batch, largest_difference, make, pair, run_engines
from tests.parallel.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(2, seconds=120.0)
    yield started
    started.close()


def of_rank(given, rank):
    """Two rows each, whose padding differs."""
    return {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in given.items()}


def gradients(model):
    return {name: one.grad.detach().clone() for name, one in model.named_parameters() if one.grad is not None}


def alone(family):
    """The mean over both ranks' losses."""
    model = make(family)
    for rank in range(2):
        (model(**of_rank(batch(family, rows=4), rank)).loss / 2).backward()
    return gradients(model)


def ddp(group, family):
    run_engines()
    _, model = pair(family)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(**of_rank(batch(family, rows=4), group.rank())).loss.backward()
    return {name.removeprefix("module."): one for name, one in gradients(wrapped).items()}


def fsdp(group, family):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    run_engines()
    _, model = pair(family)
    mesh = DeviceMesh.from_group(group, "cpu")
    lists = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{outer}.") for outer in lists):  # T5's blocks have lists of their own
            for block in model.get_submodule(name):
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(**of_rank(batch(family, rows=4), group.rank())).loss.backward()
    return {
        name: one.grad.full_tensor().detach().clone() for name, one in model.named_parameters() if one.grad is not None
    }


@pytest.mark.parametrize("way", [ddp, fsdp], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_two_ranks(ranks, family, way):
    wanted = alone(family)
    for found in ranks.run(way, 2, family):
        significant = {name: one for name, one in wanted.items() if one.abs().max() > 1e-4}
        assert len(significant) > 10
        assert largest_difference({name: found[name] for name in significant}, significant) < 1e-3
        assert wanted.keys() == found.keys()
