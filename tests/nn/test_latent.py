"""Latent attention against DeepSeek V3's, and its three forms against each other."""

import copy

import pytest
import torch

import posenc
from posenc import KVCache, LatentAttention
from tests import oracle
from tests.encodings import every

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4,
    "beta_fast": 8, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip


def small(**options):
    sizes = dict(kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, v_dim=6)
    return LatentAttention(32, 4, **{**sizes, **options}).double()


def inputs(length=11, batch=2):
    return torch.randn(batch, length, 32, dtype=torch.float64)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [None, 12])
@pytest.mark.parametrize("rope", [None, YARN])
def test_the_layer_is_deepseeks(rank, rope):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as m

    config = DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=rank, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, max_position_embeddings=32,
        **({} if rope is None else {"rope_parameters": rope}),
    )  # fmt: skip
    config._attn_implementation = "eager"
    original = m.DeepseekV3Attention(config, 0).double().eval()
    for name, parameter in original.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    ours = LatentAttention.from_config(config).double()
    ours.load_state_dict(original.state_dict())
    x, length = inputs(), 11
    cos, sin = ours.encoding.rotation(posenc.Positions(length)).k
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, length, length).double().masked_fill(future, torch.finfo(torch.float64).min)
    with oracle.wide(m), torch.no_grad():
        for mine, theirs in zip((cos, sin), m.DeepseekV3RotaryEmbedding(config)(x, torch.arange(length)[None])):
            torch.testing.assert_close(mine, theirs[..., :2], rtol=0, atol=1e-5)
        expected = original(x, (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)), mask)[0]
    for absorb in (None, True):
        ours.absorb = absorb
        oracle.check_layer(ours, lambda layer, x: layer(x), x, expected, terms=32)


LATENT_MODELS = {
    "axk1": "AXK1", "deepseek_v2": "DeepseekV2", "glm4_moe_lite": "Glm4MoeLite", "kimi_linear": "KimiLinear", "minicpm3": "MiniCPM3",
    "mistral4": "Mistral4",
}  # fmt: skip


def configuration(name):
    import transformers

    config = getattr(transformers, f"{name}Config")()
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 32, 4, 4
    config.kv_lora_rank, config.q_lora_rank, config.v_head_dim = 16, 12, 6
    config.qk_nope_head_dim, config.qk_rope_head_dim = 8, 4
    for size, value in (("qk_head_dim", 12), ("head_dim", 8 if name == "Mistral4" else 4)):
        if hasattr(config, size):
            setattr(config, size, value)
    if name == "Mistral4":
        config.rope_parameters["original_max_position_embeddings"] = 3  # temperatures from the third token on
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_the_layer_is_that_of_the_models_after_deepseek(name):
    import importlib
    import inspect

    spelled = LATENT_MODELS[name]
    m, config = importlib.import_module(f"transformers.models.{name}.modeling_{name}"), configuration(spelled)
    original = getattr(m, f"{spelled}Attention")(config, 0).double().eval()
    for parameter_name, parameter in original.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in parameter_name else 0.0, std=0.3)
    ours = LatentAttention.from_config(config).double().eval()
    ours.load_state_dict(original.state_dict())
    x, at = inputs(9), torch.arange(9)[None]
    mask = torch.zeros(1, 1, 9, 9).double().masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -1e30)
    given = {"position_ids": at} if "position_ids" in inspect.signature(original.forward).parameters else {}
    if name != "kimi_linear":
        given["position_embeddings"] = getattr(m, f"{spelled}RotaryEmbedding")(config)(x.float(), at)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), original(x, attention_mask=mask, **given)[0], rtol=0, atol=1e-5)


def test_a_model_with_factors_of_its_latents_is_refused():
    with pytest.raises(posenc.OptionError, match="longcat_flash multiplies its queries and latents"):
        LatentAttention.from_config(configuration("LongcatFlash"))


@pytest.mark.parametrize("absorb", [None, True, False])
@pytest.mark.parametrize("length_dependent", [False, True])
def test_token_by_token_is_prefill(absorb, length_dependent):
    scaling = posenc.scaling.DynamicNTK(factor=2.0, original=3) if length_dependent else None
    layer = small(absorb=absorb, encoding=posenc.RoPE(head_dim=12, rotary_dim=4, scaling=scaling))
    x, cache = inputs(7), KVCache()
    real = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    whole = layer(x, key_mask=torch.cat((real, torch.ones(2, 2, dtype=torch.bool)), 1))
    layer(x[:, :5], key_mask=real, cache=cache)
    steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in (5, 6)], 1)
    slot = cache.layers[0]
    assert (slot.k.shape, slot.v.shape) == ((2, 1, 7, 4), (2, 1, 7, 16))  # nothing but the latent and the rotated part
    close(steps[:, -1:], whole[:, -1:])
    if not length_dependent:
        close(steps, whole[:, 5:])
        close(whole[1:, 2:], layer(x[1:, 2:]))  # left padding is no padding


def test_it_absorbs_where_that_is_cheaper(monkeypatch):
    layer = small(kv_rank=64)
    used = []
    for name in ("_absorbed", "_expanded"):
        run = getattr(layer, name)
        monkeypatch.setattr(layer, name, lambda *given, run=run, name=name: used.append(name) or run(*given))
    x, cache = inputs(20), KVCache()
    whole = layer(x)
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 12), (12, 13), (13, 20))]
    close(torch.cat(parts, 1), whole)
    assert used == ["_expanded", "_expanded", "_absorbed", "_absorbed"]


def test_packed_is_separate():
    layer = small()
    first, second = inputs(5, 1), inputs(3, 1)
    documents = torch.tensor([[0] * 5 + [1] * 3])
    packed = layer(torch.cat((first, second), 1), documents=documents)
    close(packed, torch.cat((layer(first), layer(second)), 1))


@pytest.mark.parametrize("absorb", [True, False])
def test_gradients_of_every_parameter(absorb):
    layer = LatentAttention(6, 2, kv_rank=4, q_rank=3, nope_dim=2, rope_dim=2, v_dim=3, absorb=absorb).double()
    x = torch.randn(1, 3, 6, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for _, p in layer.named_parameters()]

    def run(*values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,)).square()

    assert torch.autograd.gradcheck(run, values, fast_mode=True)


def test_sinks_and_slopes_go_with_it_and_content_does_not():
    for encoding in (posenc.Sinks(heads=4, encoding=posenc.RoPE(head_dim=12, rotary_dim=4)), posenc.ALiBi(heads=4)):
        layer, x = small(encoding=encoding), inputs(5)
        other = copy.deepcopy(layer)
        other.absorb = True
        close(other(x), layer(x))
    with pytest.raises(posenc.OptionError, match="reads queries, keys or values"):
        small(encoding=posenc.Shaw(head_dim=12))(inputs(3))
    with pytest.raises(ValueError, match="x must be"):
        small()(torch.zeros(2, 3, 7))
    with pytest.raises(TypeError, match="cache must be"):
        small()(inputs(3), cache=[])


WIDTHS = {
    "rope": {"head_dim": 4},
    "mrope": {"head_dim": 4},
    "axial": {"head_dim": 4},
    "xpos": {"head_dim": 4},
    "many_axes": {"head_dim": 4},
}
REFUSED = (
    "shaw",
    "transformer_xl",
    "xlnet",
    "deberta",
    "relative_logits",
    "continuous_bias",
    "decomposed",
    "tupe",
    "mixed_rope",
    "pope",
)


@pytest.mark.parametrize("name", [name for name in every.NAMES if name not in REFUSED])
def test_every_encoding_that_fits_decodes_as_it_prefills(name):
    layer = small(encoding=every.make(name, 32, 4, **WIDTHS.get(name, {}))).eval()
    x, cache = inputs(12), KVCache()
    for parameter in layer.encoding.parameters():
        parameter.grad = None
    whole = layer(x)
    whole.square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    with torch.no_grad():
        steps = torch.cat([layer(x[:, at : at + 3], cache=cache) for at in range(0, 12, 3)], 1)
    close(steps, whole)
    reference = copy.deepcopy(layer)
    reference.engine = "reference"
    close(reference(x), whole)
    if name not in ("none", "sinks", "tempered"):  # these have no positions of their own
        without = copy.deepcopy(layer)
        without.encoding = posenc.NoPosition()
        assert (without(x) - whole).abs().max() > 1e-6


@pytest.mark.parametrize("name", REFUSED)
def test_an_encoding_that_does_not_fit_is_refused(name):
    with pytest.raises(posenc.OptionError, match="latent attention"):
        small(encoding=every.make(name, 32, 4))(inputs(4))


def test_a_rotation_wider_than_the_rotated_part_is_refused():
    with pytest.raises(posenc.OptionError, match="rotates 12 channels, and rope_dim is 4"):
        small(encoding=posenc.RoPE(head_dim=12))(inputs(4))
    with pytest.raises(posenc.OptionError, match="rotates values"):
        small(encoding=posenc.RoPE(head_dim=4, values=True))(inputs(4))


def test_forgetting_gates_follow_padding_and_documents():
    layer, x = small(encoding=posenc.FoX(d_model=32, heads=4)).eval(), inputs(8)
    real = torch.arange(8)[None] >= torch.tensor([[0], [3]])
    close(layer(x, key_mask=real)[1:, 3:], layer(x[1:, 3:]))
    documents = torch.tensor([[0] * 5 + [1] * 3]).expand(2, -1)
    close(layer(x, documents=documents), torch.cat((layer(x[:, :5]), layer(x[:, 5:])), 1))
