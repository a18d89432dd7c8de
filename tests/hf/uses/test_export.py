"""torch.export and ONNX of accelerated models: every length, padding, the original's logits; a step with a cache."""

import pytest
import torch

from tests.hf.uses.tiny import DECODERS, ENCODERS, FAMILIES, inputs, pair
from tests.nn.test_export import onnx_session, operators

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
ROWS, LENGTH = torch.export.Dim("rows", max=64), torch.export.Dim("length", min=2, max=120)
TARGETS = torch.export.Dim("targets", min=2, max=120)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, **more):
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits


class Decoding(Logits):
    """use_cache=False: what a model would cache is no output."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask, use_cache=False)


class WithTargets(Logits):
    def forward(self, input_ids, attention_mask, decoder_input_ids):
        return super().forward(input_ids, attention_mask, decoder_input_ids=decoder_input_ids, use_cache=False)


class Encoding(Logits):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)


def exported(family):
    original, model = pair(family)
    wrap = WithTargets if family == "t5" else Encoding if family in ENCODERS else Decoding
    open_sizes = {name: {0: ROWS, 1: LENGTH} for name in ("input_ids", "attention_mask")}
    if family == "t5":
        open_sizes["decoder_input_ids"] = {0: ROWS, 1: TARGETS}
    return original, torch.export.export(wrap(model).eval(), (), inputs(family), dynamic_shapes=open_sizes)


def check(family, original, run):
    """At two other lengths, and with other padding."""
    for length in (11, 29):
        given = inputs(family, length=length, base=length)
        with torch.no_grad():
            wanted, found = original(**given).logits, run(given)
        real = slice(None) if family == "t5" else given["attention_mask"].bool()
        assert (found - wanted)[real].abs().max() < 1e-5 * wanted[real].abs().max().clamp(min=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_onnx(family):
    original, program = exported(family)
    assert not any("posenc" in one for one in operators(program))
    module = program.module()
    check(family, original, lambda given: module(**given))
    session = onnx_session(program)

    def run(given):
        return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in given.items()})[0])

    check(family, original, run)


class Step(torch.nn.Module):
    """One token after a cache: its logits, and the keys and values of all layers then."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, keys, values):
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, (k, v) in enumerate(zip(keys, values, strict=True)):
            cache.update(k, v, number)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        layers = out.past_key_values.layers
        return out.logits, [one.keys for one in layers], [one.values for one in layers]


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_a_step_after_a_cache_of_any_length(family):
    original, model = pair(family)
    past = torch.export.Dim("past", min=2, max=100)

    def given(length):
        prompt = inputs(family, length=length + 1)
        start = {name: tensor[:, :-1] for name, tensor in prompt.items()}
        with torch.no_grad():
            layers = original(**start, use_cache=True).past_key_values.layers
            wanted = original(**prompt).logits[:, -1:]
        keys, values = [one.keys for one in layers], [one.values for one in layers]
        return (prompt["input_ids"][:, -1:], prompt["attention_mask"], keys, values), wanted, prompt["attention_mask"]

    sizes = [{2: past}] * 2
    program = torch.export.export(
        Step(model).eval(), given(9)[0], dynamic_shapes=({}, {1: past + 1}, sizes, sizes), strict=False
    )
    assert not any("posenc" in one for one in operators(program))
    for length in (5, 21):
        arguments, wanted, mask = given(length)
        logits, keys, _ = program.module()(*arguments)
        real = mask[:, -1].bool()
        assert (logits - wanted)[real].abs().max() < 1e-5 * wanted.abs().max().clamp(min=1.0)
        assert keys[0].shape[2] == length + 1
