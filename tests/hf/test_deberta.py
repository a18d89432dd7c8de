"""DeBERTa v1, v2 and v3 against transformers."""

import pytest
import torch
from transformers import DebertaConfig, DebertaModel, DebertaV2Config, DebertaV2ForTokenClassification, DebertaV2Model

from posenc import hf
from posenc.hf import layer
from tests.hf.compare import batch, outputs_agree, run, same
from tests.seeds import seed

SIZES = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
    max_position_embeddings=64, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False,
)  # fmt: skip
V3 = dict(position_buckets=8, max_relative_positions=20, share_att_key=True, norm_rel_ebd="layer_norm")
MODELS = {
    "v1": (DebertaModel, DebertaConfig, dict(max_relative_positions=16)),
    "v1 short": (DebertaModel, DebertaConfig, {}),
    "v1 c2p": (DebertaModel, DebertaConfig, dict(max_relative_positions=16, pos_att_type=["c2p"])),
    "v2": (DebertaV2Model, DebertaV2Config, dict(position_buckets=8, max_relative_positions=20, conv_kernel_size=3)),
    "v2 p2c": (DebertaV2Model, DebertaV2Config, dict(max_relative_positions=12, pos_att_type=["p2c"])),
    "v3": (DebertaV2Model, DebertaV2Config, V3),
    "v3 absolute": (DebertaV2Model, DebertaV2Config, dict(relative_attention=False, position_biased_input=True)),
}


def make(name):
    model, config, options = MODELS[name]
    torch.manual_seed(seed(1))
    made = model(config(**{**SIZES, **options})).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # scores that matter
    return made


@pytest.mark.parametrize("name", ["v1 short", "v1 c2p", "v3 absolute"])
def test_outputs_gradients_and_restore(name):
    ids, mask = batch(41)
    same(make(name), dict(input_ids=ids, attention_mask=mask), None, layers=2)


@pytest.mark.parametrize("name", ["v1", "v3"])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_awkward_lengths(name, length):
    ids = torch.randint(2, 99, (2, length))
    model = make(name)
    theirs, _ = run(model, dict(input_ids=ids), None, backward=False)
    outputs_agree(run(hf.accelerate(model), dict(input_ids=ids), None, backward=False)[0], theirs)


@pytest.mark.parametrize("name", ["v1", "v3"])
def test_output_attentions_falls_back(name):
    ids, mask = batch(41)
    model = make(name)
    theirs = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    ours = hf.accelerate(model)(input_ids=ids, attention_mask=mask, output_attentions=True)
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        assert torch.equal(a, b)


def test_a_mask_of_pairs_is_kept():
    mask = ((torch.arange(41)[:, None] - torch.arange(41)).abs() < 7).long().repeat(3, 1, 1)
    mask[1, 5] = 0  # sees nothing
    model, x = make("v3"), torch.randn(3, 41, 32)
    theirs = model.encoder(x, mask).last_hidden_state
    outputs_agree(hf.accelerate(model).encoder(x, mask).last_hidden_state, theirs)
    keys = batch(41)[1][:, None, None]  # padded queries see what the others do
    ours = model.encoder(x, keys.bool()).last_hidden_state
    outputs_agree(ours, hf.restore(model).encoder(x, keys.bool()).last_hidden_state)


def test_no_dense_mask_reaches_a_layer(monkeypatch):
    ids, mask = batch(41)
    model, calls = hf.accelerate(make("v3")), []
    attend = layer.attend
    monkeypatch.setattr(layer, "attend", lambda *a, **k: calls.append(k) or attend(*a, **k))
    model(input_ids=ids, attention_mask=mask)
    assert len(calls) == 2
    assert all(given.get("mask") is None and given["key_mask"].shape == (3, 41) for given in calls)


def test_talking_heads_are_refused_by_name():
    model = DebertaModel(DebertaConfig(**SIZES, talking_head=True))
    with pytest.raises(hf.UnsupportedModel, match=r"encoder\.layer\.0\.attention\.self .*mixes the heads' scores"):
        hf.accelerate(model)


def test_training_with_checkpointing_learns():
    ids, mask = batch(41)
    torch.manual_seed(seed(0))
    model = hf.accelerate(DebertaV2ForTokenClassification(DebertaV2Config(**SIZES, **V3, num_labels=3))).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids % 3).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
