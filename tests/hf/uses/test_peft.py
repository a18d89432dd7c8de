"""LoRA: adapters on the projections of an accelerated model train, merge and load as on the original."""

import copy

import pytest
import torch

from posenc import hf
from tests.hf.uses.tiny import FAMILIES, batch, inputs, largest_difference, logits_at_tokens, make, pair

peft = pytest.importorskip("peft")

TARGETS = {
    "t5": ["q", "v"], "deberta": ["query_proj", "value_proj"], "mpnet": ["q", "v"], "bloom": ["query_key_value"],
    "mpt": ["Wqkv"], "llama": ["q_proj", "v_proj"],
}  # fmt: skip


def adapted(model, family):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[family], init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def train(model, family):
    """Two steps; the adapters after them."""
    model.train()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for step in range(2):
        model(**batch(family, base=2 + step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("order", ["accelerated before", "accelerated after"])
@pytest.mark.parametrize("family", FAMILIES)
def test_train_merge_save_and_load(family, order, tmp_path):
    original = make(family)
    theirs = adapted(copy.deepcopy(original), family)
    if order == "accelerated before":
        ours = adapted(hf.accelerate(copy.deepcopy(original)), family)
    else:
        ours = hf.accelerate(adapted(copy.deepcopy(original), family))
    assert hf.report(ours).layers
    start = {name: one.detach().clone() for name, one in ours.named_parameters() if one.requires_grad}
    wanted, found = train(theirs, family), train(ours, family)
    assert largest_difference(
        {name: found[name] - start[name] for name in start}, {name: wanted[name] - start[name] for name in start}
    ) < 1e-3  # fmt: skip

    given = inputs(family, length=23)
    with torch.no_grad():
        want = logits_at_tokens(family, theirs, given)
        tolerance = 1e-4 * want.abs().max()
        assert (logits_at_tokens(family, ours, given) - want).abs().max() < tolerance

        ours.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(hf.accelerate(copy.deepcopy(original)), tmp_path).eval()
        assert torch.equal(logits_at_tokens(family, loaded, given), logits_at_tokens(family, ours, given))

        merged = ours.merge_and_unload()
        assert hf.report(merged).layers
        assert (logits_at_tokens(family, merged, given) - want).abs().max() < tolerance
        restored = hf.restore(merged)
        assert not any("posenc" in type(module).__module__ for module in restored.modules())
        assert (logits_at_tokens(family, restored, given) - want).abs().max() < tolerance


def test_the_base_model_is_unchanged_without_its_adapter():
    original, model = pair("llama")
    ours = adapted(model, "llama")
    given = inputs("llama")
    with torch.no_grad(), ours.disable_adapter():
        found = logits_at_tokens("llama", ours, given)
        assert (found - logits_at_tokens("llama", original, given)).abs().max() < 1e-4
