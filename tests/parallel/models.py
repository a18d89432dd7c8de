"""What the ranks compute in test_hf.py: a model of transformers on a part of every sequence, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    DebertaV2Model,
    LongT5Config,
    LongT5EncoderModel,
    MptConfig,
    MptForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)  # fmt: skip

from posenc import hf, parallel
from tests.parallel.cases import difference, local

T5_SIZES = dict(
    vocab_size=50, d_model=24, d_kv=6, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
    relative_attention_num_buckets=8, relative_attention_max_distance=20,
)  # fmt: skip
DEBERTA_SIZES = dict(
    vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, type_vocab_size=0,
    max_position_embeddings=64, relative_attention=True, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
MODELS = {
    "t5": (T5ForConditionalGeneration, T5Config(**T5_SIZES)),
    "t5 encoder": (T5EncoderModel, T5Config(**T5_SIZES)),
    "umt5": (UMT5ForConditionalGeneration, UMT5Config(**T5_SIZES)),
    "deberta v1": (DebertaModel, DebertaConfig(**DEBERTA_SIZES, max_relative_positions=16, position_biased_input=True)),
    "deberta v3": (
        DebertaV2Model,
        DebertaV2Config(**DEBERTA_SIZES, position_buckets=8, max_relative_positions=-1, share_att_key=True,
                        norm_rel_ebd="layer_norm", position_biased_input=False),
    ),
    "bloom": (BloomForCausalLM, BloomConfig(vocab_size=50, hidden_size=24, n_layer=2, n_head=4)),
    "mpt": (MptForCausalLM, MptConfig(vocab_size=50, d_model=24, n_layers=2, n_heads=4, max_seq_len=64)),
}  # fmt: skip


def make(name):
    torch.manual_seed(1)
    kind, config = MODELS[name]
    model = kind(config).double().train()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def output(model, inputs):
    found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def compare(group, name, strategy, balance, padded):
    cp = parallel.ContextParallel(group, strategy=strategy, balance=balance, timeout=60.0)
    length = 4 * cp.unit
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 50, (2, length), generator=generator)
    inputs = {"input_ids": ids}
    if padded:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, :3] = 0
        mask[1, -2:] = 0
        inputs["attention_mask"] = mask
    real = torch.ones(2, length, dtype=torch.bool) if not padded else mask.bool()
    if name in ("t5", "umt5"):
        inputs["decoder_input_ids"] = ids.flip(1)[:, : length // 2]
        real = torch.ones(2, length // 2, dtype=torch.bool)
    whole = make(name)
    part = hf.accelerate(copy.deepcopy(whole), context_parallel=cp)
    hf.accelerate(
        whole, engine="reference"
    )  # not the original, which DeBERTa's has on short texts and rounds to float32
    exact = output(whole, inputs)
    weight = torch.randn(exact.shape, generator=generator, dtype=torch.float64) * real[..., None]
    (exact * weight).sum().backward()
    found = output(part, {key: local(x, cp, 1) for key, x in inputs.items()})
    (found * local(weight, cp, 1)).sum().backward()
    own = local(real, cp, 1)
    assert difference(found[own], local(exact, cp, 1)[own]) < 1e-9, (name, strategy, balance, padded)
    parallel.reduce_gradients(part, cp)
    for (key, a), b in zip(part.named_parameters(), whole.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        if b.grad is not None:
            assert difference(a.grad, b.grad) < 1e-9, (name, strategy, balance, padded, key, difference(a.grad, b.grad))
    hf.restore(part)
    assert not [key for module in part.modules() for key in module.__dict__ if key.startswith("posenc")]


def compare_models(group, strategies):
    for name in MODELS:
        for strategy, balance in strategies:
            for padded in (False, True):
                compare(group, name, strategy, balance, padded)


def refusals(group):
    cp = parallel.ContextParallel(group)
    longt5 = LongT5EncoderModel(LongT5Config(**T5_SIZES, local_radius=3))
    with pytest.raises(hf.UnsupportedModel, match="LongT5LocalAttention cannot share a sequence among ranks"):
        hf.accelerate(longt5, context_parallel=cp)
    model = hf.accelerate(make("bloom"), context_parallel=cp)
    ids = torch.randint(2, 50, (1, 6))
    with pytest.raises(ValueError, match="shifts its labels by one token"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="output_attentions=True needs all scores in one process"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(ValueError, match="continues a cache"):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        model(input_ids=ids, past_key_values=cache)
    dist.barrier(group=group)
    again = hf.accelerate(model)
    assert all(getattr(module, "posenc_context", None) is None for module in again.modules())
