"""Every family's calls: what belongs to one stays in it (calls within calls, layers computed again in backward); masks of every
dtype."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from posenc import hf
from tests.hf.cases import CASES, EVERY
from tests.hf.compare import gradients_agree, outputs_agree
from tests.seeds import generator

pytestmark = [  # the originals' of WavLM, and of token ids
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


def others(inputs):
    """The same texts with the padding of another row, with none, and with weights that only the original makes."""
    mask = inputs["attention_mask"]
    calls = [{**inputs, "attention_mask": mask.roll(1, 0)}, {**inputs, "attention_mask": torch.ones_like(mask)}]
    return calls + ([] if "x" in inputs else [{**inputs, "output_attentions": True}])


def output(model, inputs):
    cached = hasattr(getattr(model, "config", None), "use_cache")
    found = model(**inputs, **({"use_cache": False} if cached else {}))
    return found[0] if isinstance(found, tuple) else found.to_tuple()[0]


@pytest.fixture
def accelerated(request):
    model, (inputs, _) = CASES[request.param]()
    first = next(iter(inputs.values()))
    if first.is_floating_point():
        first.requires_grad_()  # reentrant checkpointing needs it
    return hf.accelerate(model).eval(), inputs


every = pytest.mark.parametrize("accelerated", CASES, indirect=True)


@every
def test_a_call_within_a_call(accelerated):
    """Before each layer another call begins and ends, as another thread's may."""
    model, inputs = accelerated
    with torch.no_grad():
        wanted = output(model, inputs)
        inside = False

        def interrupt(*_):
            nonlocal inside
            if not inside:
                inside = True
                for other in others(inputs):
                    output(model, other)
                inside = False

        for layer in hf.report(model).layers:
            model.get_submodule(layer.name).register_forward_pre_hook(interrupt)
        assert torch.equal(output(model, inputs), wanted)


def blocks(model):
    """(list, number, block): the layers of a model, each with its attention in it."""
    inner = {
        id(one)
        for stack in model.modules()
        if isinstance(stack, torch.nn.ModuleList)
        for block in stack
        for one in block.modules()
    }
    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList) and id(stack) not in inner:
            yield from ((stack, number, block) for number, block in enumerate(stack))


def gradients(model, inputs):
    """Of the first call, after others."""
    model.zero_grad()
    found = output(model, inputs)
    for other in others(inputs):
        output(model, other)
    weights = torch.randn(found.shape, generator=generator(5))
    (found * weights).sum().backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@every
@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_layers_checkpointed_by_hand(accelerated, kind, request):
    model, inputs = accelerated
    name = request.node.callspec.params["accelerated"]
    if kind is CheckpointImpl.REENTRANT and EVERY[name].checkpoints == (False,):
        pytest.skip("the original raises")
    wanted = gradients(model, inputs)
    found = list(blocks(model))
    layers = {model.get_submodule(layer.name) for layer in hf.report(model).layers}
    assert layers <= {one for _, _, block in found for one in block.modules()}
    for stack, number, block in (one for one in found if layers & set(one[2].modules())):  # not UDOP's biases
        stack[number] = checkpoint_wrapper(block, checkpoint_impl=kind)
    ours = gradients(model, inputs)
    gradients_agree(ours, wanted)


KINDS = {
    "bool": lambda mask: mask.bool(),
    "float": lambda mask: mask.float(),
    "fractions": lambda mask: mask * 0.5,
    "additive": lambda mask: torch.where(mask.bool(), 0.0, -1e4),  # a mistake; the originals read it as truth values
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_another_dtype_means_what_it_means_to_the_original(name):
    model, (inputs, padding) = CASES[name]()
    model.eval()
    found = {}
    for _ in range(2):
        for kind, change in KINDS.items():
            given = {**inputs, "attention_mask": change(inputs["attention_mask"])}
            try:
                with torch.no_grad():
                    one = output(model, given)
            except (IndexError, RuntimeError, TypeError, ValueError) as error:  # XLNet subtracts its mask from 1
                one = error
            if kind not in found:
                found[kind] = one
            elif name == "longt5 transient-global" and kind in ("fractions", "additive"):
                assert "must hold 1 (real) and 0 (padding), got torch.float32 from" in str(one)
            elif not isinstance(found[kind], Exception):
                # what stands at padding, or was made of nothing else, is nobody's output
                real = given["attention_mask"].bool()
                real = real.any(1) if padding is None or real.shape != one.shape[:2] else real
                outputs_agree(one[real], found[kind][real])
        hf.accelerate(model)
    assert isinstance(found["float"], torch.Tensor)
