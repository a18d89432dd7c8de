"""to_posenc gives the layer's own outputs; from_posenc brings every weight back."""

import copy

import pytest
import torch
from transformers import (
    DebertaConfig,
    DebertaModel,
    DebertaV2Config,
    DebertaV2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5Model,
    XLNetConfig,
    XLNetModel,
)

from posenc import hf
from tests.hf.compare import outputs_agree
from tests.seeds import generator, seed

X = torch.randn(2, 23, 32, generator=generator(4))
MASK = torch.ones(2, 23, dtype=torch.bool)
MASK[1, 15:] = False


def randomised(model):
    torch.manual_seed(seed(1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def weights_return(attention, layer, shared=None):
    """The layer's weights survive the way there and back."""
    wanted = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    hf.from_posenc(attention, layer, shared)
    for name, value in layer.state_dict().items():
        if "LayerNorm" not in name and "layer_norm" not in name:
            assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("stack, number", [("encoder", 0), ("decoder", 0), ("encoder", 1)])
def test_t5(stack, number):
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=16, num_layers=2, num_heads=4,
                      relative_attention_num_buckets=8, relative_attention_max_distance=20)  # fmt: skip
    blocks = randomised(getattr(T5Model(config), stack)).block
    first, layer = blocks[0].layer[0].SelfAttention, blocks[number].layer[0].SelfAttention
    attention = hf.to_posenc(layer, first if number else None)
    mask = torch.zeros(1, 1, 23, 23)
    if stack == "decoder":
        mask = mask.masked_fill(torch.ones(23, 23, dtype=torch.bool).triu(1), -1e9)
    outputs_agree(attention(X), layer(X, mask=mask, position_bias=first.compute_bias(23, 23))[0])
    weights_return(attention, layer, first)


@pytest.mark.parametrize("options", [
    dict(position_buckets=8, max_relative_positions=20, share_att_key=True, norm_rel_ebd="layer_norm"),
    dict(max_relative_positions=12),
    None,
])  # fmt: skip
def test_deberta(options):
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16,
                 relative_attention=True, pos_att_type=["c2p", "p2c"], max_position_embeddings=64)  # fmt: skip
    if options is None:
        model = DebertaModel(DebertaConfig(**sizes, max_relative_positions=12))
    else:
        model = DebertaV2Model(DebertaV2Config(**sizes, **options))
    encoder = randomised(model).encoder
    layer = encoder.layer[0].attention
    attention = hf.to_posenc(layer, encoder)
    mask = encoder.get_attention_mask(MASK.long())
    theirs = layer.output.dense(
        layer.self(X, mask, relative_pos=encoder.get_rel_pos(X), rel_embeddings=encoder.get_rel_embedding())[0]
    )
    outputs_agree(attention(X, key_mask=MASK)[MASK], theirs[MASK])
    weights_return(attention, layer, encoder)
    with pytest.raises(ValueError, match=r"to_posenc\(layer\.attention, model\.encoder\)"):
        hf.to_posenc(layer)


def test_xlnet():
    model = randomised(XLNetModel(XLNetConfig(vocab_size=50, d_model=32, n_layer=1, n_head=4, d_inner=16)))
    layer = model.layer[0].rel_attn
    attention = hf.to_posenc(layer)
    segments = (torch.arange(23) > 9).long().expand(2, 23)
    x = X.transpose(0, 1)
    waves = model.relative_positional_encoding(23, 23, bsz=2)
    pairs = torch.nn.functional.one_hot((segments.t()[:, None] != segments.t()[None, :]).long(), 2).float()
    heads = [torch.einsum("ibh,hnd->ibnd", states, w) for states, w in
             ((x, layer.q), (x, layer.k), (x, layer.v), (waves, layer.r))]  # fmt: skip
    theirs = torch.einsum("ibnd,hnd->bih", layer.rel_attn_core(*heads, seg_mat=pairs), layer.o)
    outputs_agree(attention(X, segments=segments), theirs)
    weights_return(attention, layer)


@pytest.mark.parametrize(
    "options",
    [dict(attn_type="uni"), dict(clamp_len=5), dict(bi_data=True), dict(attn_type="uni", clamp_len=5)],
    ids=str,
)
def test_an_xlnet_layer_reads_what_only_its_model_knows(options):
    config = XLNetConfig(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=16, **options)
    model = randomised(XLNetModel(config))
    layer, calls = model.layer[1].rel_attn, []
    layer.layer_norm = torch.nn.Identity()  # what is left is the input and attention's output
    layer.register_forward_hook(lambda module, given, output: calls.append((given[0], output[0] - given[0])))
    model(torch.arange(46).view(2, 23), use_mems=False)
    ((x, theirs),) = calls
    attention = hf.to_posenc(layer, model)
    outputs_agree(attention(x.transpose(0, 1)), theirs.transpose(0, 1))
    weights_return(attention, layer, model)
    with pytest.raises(ValueError, match="shared module is the model, got Identity"):
        hf.to_posenc(layer, layer.layer_norm)


@pytest.mark.parametrize("model, config, more", [
    (LlamaModel, LlamaConfig, dict(head_dim=12, attention_bias=True)),
    (LlamaModel, LlamaConfig, dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))),
    (Qwen2Model, Qwen2Config, {}),
    (Qwen2Model, Qwen2Config, dict(use_sliding_window=True, sliding_window=7, max_window_layers=0)),
    (MistralModel, MistralConfig, dict(sliding_window=7)),
    (MistralModel, MistralConfig, dict(sliding_window=None)),
])  # fmt: skip
def test_llama(model, config, more):
    model = randomised(model(config(vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=1,
                                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
                                    **more)))  # fmt: skip
    layer = model.layers[0].self_attn
    attention = hf.to_posenc(layer)
    phases = model.rotary_emb(X, torch.arange(23)[None])
    back = torch.arange(23)[:, None] - torch.arange(23)
    visible = (back >= 0) & (back < (more.get("sliding_window") or 23))
    mask = torch.zeros(1, 1, 23, 23).masked_fill(~visible, -1e9)
    outputs_agree(attention(X), layer(X, position_embeddings=phases, attention_mask=mask)[0])
    weights_return(attention, layer)


def test_other_layers_are_named():
    with pytest.raises(hf.UnsupportedModel, match="Linear cannot be converted; the layers that can are T5Attention"):
        hf.to_posenc(torch.nn.Linear(2, 2))
    config = DebertaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, talking_head=True,
                           intermediate_size=16, relative_attention=True, pos_att_type=["c2p"])  # fmt: skip
    encoder = DebertaModel(config).encoder
    with pytest.raises(hf.UnsupportedModel, match="talking heads"):
        hf.to_posenc(encoder.layer[0].attention, encoder)
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
                         rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))  # fmt: skip
    with pytest.raises(hf.UnsupportedModel, match="rotates whole heads of 8 channels.*partial_rotary_factor says 4"):
        hf.to_posenc(LlamaModel(config).layers[0].self_attn)
