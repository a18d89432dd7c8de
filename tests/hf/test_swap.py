"""accelerate, restore and report: nothing is changed unless everything can be, and everything can be undone."""

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertModel,
    LongT5EncoderModel,
    MT5Config,
    MT5EncoderModel,
    SeamlessM4TConfig,
    SeamlessM4TForTextToText,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    XLMConfig,
    XLMModel,
)
from transformers.models.t5.modeling_t5 import T5Attention

import posenc
from posenc import hf
from posenc.hf import family, interface, interface_mask, layer, longt5, xlnet
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


@pytest.mark.parametrize(("make", "layers"), [(bert, 1), (seamless_m4t, 6)])
def test_models_without_a_term_go_through_the_interface(make, layers):
    model = make()
    before = shape_of(model)
    hf.accelerate(model)
    assert {(one.encoding, one.way) for one in hf.report(model).layers} == {("no term", "interface")}
    assert len(hf.report(model).layers) == layers
    assert shape_of(hf.restore(model)) == before
    assert "nothing is accelerated" in str(hf.report(model))


def test_models_without_the_interface_are_refused_with_the_families():
    model = XLMModel(XLMConfig(vocab_size=50, emb_dim=16, n_layers=1, n_heads=2))
    with pytest.raises(hf.UnsupportedModel, match=r"XLMModel \(xlm\) has no attention layer that calls .* t5, "):
        hf.accelerate(model)


def test_accelerate_twice_is_once_and_can_change_the_engine():
    model = hf.accelerate(hf.accelerate(T5EncoderModel(T5Config(**TINY))), engine="reference")
    layer = model.encoder.block[0].layer[0].SelfAttention
    assert vars(layer)["posenc_replaced"] == ("compute_bias",)
    assert {one.engine for one in hf.report(model).layers} == {"reference"}
    assert "2 × T5Attention (t5) on reference" in str(hf.report(model))
    hf.accelerate(model)
    first = hf.report(model).layers[0]
    assert first.name == "encoder.block.0.layer.0.SelfAttention"
    assert first.engine in posenc.ENGINES
    hf.restore(model)
    assert "compute_bias" not in vars(layer)


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="engine='fast' is unknown; use 'auto' or one of"):
        hf.accelerate(T5EncoderModel(T5Config(**TINY)), engine="fast")


@pytest.fixture
def fresh():
    """Families as a process finds them that has used none."""
    for cached in (family.load, family.check_numbers):
        cached.cache_clear()
    yield
    for cached in (family.load, family.check_numbers):
        cached.cache_clear()


def test_a_method_that_changed_refuses_its_family_alone(fresh, monkeypatch):
    monkeypatch.setattr(T5Attention, "compute_bias", lambda self, lengths, device=None: None)
    model = T5EncoderModel(T5Config(**TINY))
    before = shape_of(model)
    words = r"nothing was changed, because t5 is refused with transformers \S+: T5Attention\.compute_bias takes \(lengths, device\)"
    with pytest.raises(hf.UnsupportedModel, match=words):
        hf.accelerate(model)
    assert shape_of(model) == before
    hf.accelerate(MT5EncoderModel(MT5Config(**TINY)))
    monkeypatch.delattr(T5Attention, "compute_bias")
    family.load.cache_clear()
    with pytest.raises(hf.UnsupportedModel, match=r"T5Attention\.compute_bias is gone"):
        hf.accelerate(model)


def test_numbers_that_changed_refuse_the_family(fresh, monkeypatch):
    """A release whose buckets differ: names and arguments are the same."""
    buckets = T5Attention._relative_position_bucket
    monkeypatch.setattr(T5Attention, "_relative_position_bucket", staticmethod(lambda *a, **k: 0 * buckets(*a, **k)))
    with pytest.raises(hf.UnsupportedModel, match=r"t5 is refused with transformers \S+: its output differs by"):
        hf.accelerate(T5EncoderModel(T5Config(**TINY)))


def test_verify_compares_this_model_itself():
    model = T5ForConditionalGeneration(T5Config(**TINY, decoder_start_token_id=0))
    assert len(hf.report(hf.accelerate(model, verify=True)).layers) == 6
    hf.restore(model)
    # block 0 has the table, and the original reads nothing of this in the others
    model.encoder.block[1].layer[0].SelfAttention.relative_attention_num_buckets = 16
    before = shape_of(model)
    with pytest.raises(
        hf.UnsupportedModel, match="nothing was changed, because this model, accelerated, raises ValueError: lookups"
    ):
        hf.accelerate(model, verify=True)
    assert shape_of(model) == before


@pytest.mark.parametrize("function", [hf.accelerate, hf.report, hf.restore, lambda x: hf.extend(x, None)])
def test_what_is_no_model(function):
    class Pipeline:
        model = torch.nn.Linear(2, 2)

    with pytest.raises(
        TypeError, match=r"got an object of class str; load it: AutoModel.from_pretrained\('t5-small'\)"
    ):
        function("t5-small")
    with pytest.raises(TypeError, match=r"class Pipeline; give its model, \.model"):
        function(Pipeline())
    with pytest.raises(TypeError, match=r"got the class T5Model"):
        function(transformers.T5Model)
    with pytest.raises(TypeError, match=r"class NoneType; load one"):
        function(None)


def test_a_report_of_swin_by_name():
    """Its configuration has one number of heads for each stage."""
    sizes = dict(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4)
    model = transformers.SwinModel._from_config(transformers.SwinConfig(**sizes), attn_implementation="posenc")
    assert len(hf.report(model).layers) == 2


@pytest.mark.parametrize(
    ("folder", "module"),
    [("bloom", layer), ("mpt", layer), ("gptj", layer), ("deberta_v2", layer), ("mpnet", layer), ("t5", interface), ("parakeet", interface),
        ("wav2vec2_conformer", interface), ("seamless_m4t", interface), ("longt5", longt5), ("xlnet", xlnet)],
)  # fmt: skip
def test_the_check_of_a_family_runs_its_engine(folder, module, monkeypatch):
    """Short texts keep dense biases on a CPU; the check must notice an engine that is wrong for longer ones."""
    monkeypatch.undo()  # the rules as they are, not those of these tests
    right = module.attend

    def wrong(*args, **options):
        found = right(*args, **options)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(module, "attend", wrong)
    assert "differs" in str(family.check_numbers.__wrapped__(folder))


@pytest.mark.parametrize("state", ["meta", "bfloat16", "float64", "autocast"])
def test_checks_do_not_depend_on_the_caller_s_defaults(state):
    """A check runs once in a process: what it finds under one caller's defaults is kept for all."""
    for folder in ("t5", "deberta", "codegen"):
        try:
            if state in ("bfloat16", "float64"):
                torch.set_default_dtype(getattr(torch, state))
                reason = family.check_numbers.__wrapped__(folder)
                assert torch.get_default_dtype() == getattr(torch, state)
            else:
                with torch.device("meta") if state == "meta" else torch.autocast("cpu", dtype=torch.bfloat16):
                    reason = family.check_numbers.__wrapped__(folder)
        finally:
            torch.set_default_dtype(torch.float32)
        assert reason is None


def test_the_masks_that_are_known_do_not_depend_on_the_default_device():
    with torch.device("meta"):
        assert interface_mask._known.__wrapped__() == interface_mask._known.__wrapped__()
