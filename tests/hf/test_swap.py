"""accelerate, restore and report: nothing is changed unless everything can be, and everything can be undone."""

import logging

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    LongT5EncoderModel,
    SeamlessM4TConfig,
    SeamlessM4TForTextToText,
    T5Config,
    T5EncoderModel,
)
from transformers.models.t5.modeling_t5 import T5Attention

import posenc
from posenc import hf
from posenc.hf import layer, versions
from tests.hf.compare import shape_of

TINY = dict(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)


def test_an_unsupported_part_raises_before_anything_is_changed():
    class Mine(T5Attention):
        pass

    model = T5EncoderModel(T5Config(**TINY))
    model.encoder.block[1].layer[0].SelfAttention.__class__ = Mine
    before = shape_of(model)
    with pytest.raises(hf.UnsupportedModel, match=r"encoder\.block\.1\.layer\.0\.SelfAttention is a Mine, a subclass"):
        hf.accelerate(model)
    assert shape_of(model) == before


@pytest.mark.parametrize("model", [T5EncoderModel, LongT5EncoderModel])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(relative_attention_num_buckets=17), "buckets=17 cannot be divided between two directions"),
        (dict(relative_attention_max_distance=8), "max_distance=8 must exceed"),
    ],
)
def test_buckets_that_have_no_index_raise_before_anything_is_changed(model, options, words):
    made = model(model.config_class(**{**TINY, **options}))
    before = shape_of(made)
    with pytest.raises(
        hf.UnsupportedModel, match=rf"nothing was changed, because encoder\.block\.0\.\S* \(\w+\) .*{words}"
    ):
        hf.accelerate(made)
    assert shape_of(made) == before


def bert():
    return BertModel(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))


def seamless_m4t():
    """Its text encoder and decoder alone: only the speech encoder has relative positions."""
    sizes = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    return SeamlessM4TForTextToText(SeamlessM4TConfig(vocab_size=50, hidden_size=16, **sizes))


@pytest.mark.parametrize("make", [bert, seamless_m4t])
def test_absolute_models_pass_through_with_a_note(make, caplog):
    model = make()
    before = shape_of(model)
    layer._logged.clear()
    with caplog.at_level(logging.WARNING, logger="posenc.hf"):
        assert hf.accelerate(model) is model
    assert f"{make.__name__}: positions enter at the input" in caplog.text
    assert shape_of(model) == before
    assert "nothing is swapped" in str(hf.report(model))


def test_other_models_are_refused_with_the_families():
    model = LlamaModel(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                   num_attention_heads=2, num_key_value_heads=1))  # fmt: skip
    with pytest.raises(hf.UnsupportedModel, match=r"LlamaModel \(llama\) .* t5, .*extend"):
        hf.accelerate(model)


def test_accelerate_twice_is_once_and_can_change_the_engine():
    model = hf.accelerate(hf.accelerate(T5EncoderModel(T5Config(**TINY))), engine="reference")
    assert len(model.encoder._forward_pre_hooks) == 1
    assert {one.engine for one in hf.report(model).layers} == {"reference"}
    assert "2 × T5Attention (t5) on reference" in str(hf.report(model))
    hf.accelerate(model)
    first = hf.report(model).layers[0]
    assert first.name == "encoder.block.0.layer.0.SelfAttention"
    assert first.engine in posenc.ENGINES
    hf.restore(model)
    assert not model.encoder._forward_pre_hooks


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="engine='fast' is unknown; use 'auto' or one of"):
        hf.accelerate(T5EncoderModel(T5Config(**TINY)), engine="fast")


@pytest.mark.parametrize("found", ["5.15.1", "4.57.6", "6.0.0"])
def test_versions_outside_the_range_are_refused(monkeypatch, found):
    monkeypatch.setattr("transformers.__version__", found)
    with pytest.raises(ImportError, match=rf"5\.16 to 5\.\d+, found {found}"):
        hf.accelerate(torch.nn.Linear(1, 1))


def test_the_installed_version_is_inside_the_range():
    versions.check()
