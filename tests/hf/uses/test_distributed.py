"""Two processes: DistributedDataParallel and fully_shard (FSDP2) over an accelerated model."""

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomModel,
    DebertaV2Config,
    DebertaV2Model,
    GPTJConfig,
    GPTJModel,
    XLNetConfig,
    XLNetModel,
)
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from posenc import hf
from posenc.hf.layer import own_class
from tests.hf.uses.tiny import FAMILIES, batch, largest_difference, make, pair, run_engines
from tests.parallel.ranks import Ranks
from tests.seeds import seed

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


LAYERS = (BloomAttention, DisentangledSelfAttention, GPTJAttention, XLNetRelativeAttention)


def sharded_layers(group, name):
    """What does not hold of a model whose attention layers fully_shard sharded after `accelerate`, and before."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    run_engines()
    mesh, given = DeviceMesh.from_group(group, "cpu"), {"input_ids": torch.arange(14).view(2, 7) + 3}
    original = tiny_of(name)
    accelerated = hf.accelerate(copy.deepcopy(original))
    with torch.no_grad():
        wanted = original(**given)[0]
    faults = []
    for first in ("accelerate", "fully_shard"):
        model = copy.deepcopy(original)
        layers = [module for module in model.modules() if type(module) in LAYERS]
        if first == "accelerate":
            hf.accelerate(model)
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh)
        if first == "fully_shard":
            hf.accelerate(model)
        kinds = [own_class(type(module)) for module in model.modules()]
        with torch.no_grad():
            outputs = [model(**given)[0], model(**given, output_attentions=True)[0]]
            holds = {
                "classes": kinds == [type(module) for module in accelerated.modules()],
                "hooks": ("posenc_hook" in vars(model)) == ("posenc_hook" in vars(accelerated)),
                "report": str(hf.report(model)).count("posenc") == str(hf.report(accelerated)).count("posenc"),
            }
            outputs.append(hf.restore(model)(**given)[0])
        holds["outputs"] = all(torch.allclose(one, wanted, atol=1e-5) for one in outputs)
        holds["sharded"] = len(layers) > 1 and all(isinstance(layer, FSDPModule) for layer in layers)
        faults += [(first, what) for what, is_right in holds.items() if not is_right]
    return faults


def tiny_of(name):
    torch.manual_seed(seed(3))
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
    if name == "deberta":
        model = DebertaV2Model(
            DebertaV2Config(**sizes, relative_attention=True, pos_att_type=["c2p", "p2c"], max_position_embeddings=16)
        )
    elif name == "xlnet":
        model = XLNetModel(XLNetConfig(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=32))
    elif name == "bloom":
        model = BloomModel(BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4))
    else:
        model = GPTJModel(GPTJConfig(vocab_size=50, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=16))
    return model.eval()


@pytest.mark.parametrize("name", ["deberta", "xlnet", "bloom", "gptj"])
def test_layers_may_be_sharded_before_or_after(ranks, name):
    """fully_shard derives a class of its own from a layer's, which accelerate and restore keep."""
    assert ranks.run(sharded_layers, 2, name) == [[], []]
