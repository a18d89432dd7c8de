"""Short texts on a CPU: the originals, with their dense biases, are faster there, and every family leaves them to it."""

import pytest
import torch

from posenc import functional, hf
from posenc.hf import interface, layer, longt5, rules, xlnet
from tests.hf.cases import CASES, EVERY
from tests.hf.compare import outputs_agree
from tests.hf.harness import inputs_of, real_output


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's original
@pytest.mark.parametrize("name", CASES)
def test_a_short_text_runs_no_engine_with_a_bias(name, monkeypatch):
    for number in rules.NUMBERS:
        monkeypatch.setattr(rules, number, {} if number == "LEARNED" else 10**6)
    case, calls = EVERY[name], []
    model, inputs = case.make(), inputs_of(case, "mixed")
    with torch.no_grad():
        wanted = real_output(model, inputs)
        hf.accelerate(model)
        for module in (interface, layer, longt5, xlnet):
            monkeypatch.setattr(
                module, "attend", lambda q, k, v, plan, **o: calls.append(plan) or functional.attend(q, k, v, plan, **o)
            )
        outputs_agree(real_output(model, inputs), wanted)
    assert all(not plan.lookups and plan.slopes is None for plan in calls)
