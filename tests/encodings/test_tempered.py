"""Temperatures by position and rotation in some layers only, against the models that have them."""

import pytest
import torch

import posenc
from posenc import Positions
from posenc.core.encoding import Kept
from tests import oracle
from tests.encodings import every

SIZES = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=4)


def layers_of(name):
    """(the module of transformers, its configuration, its attention layer n)."""
    import importlib

    import transformers

    more = {
        "llama4": dict(no_rope_layers=[1, 0, 1, 0], attn_temperature_tuning=True, floor_scale=3, attn_scale=0.3),
        "smollm3": dict(no_rope_layers=[1, 1, 1, 0], use_sliding_window=False, pad_token_id=0),
        "cohere2": dict(layer_types=["sliding_attention"] * 3 + ["full_attention"], sliding_window=64),
        "exaone4": dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=64),
        "ministral3": dict(rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 3,
            "llama_4_scaling_beta": 0.4, "beta_fast": 4, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }, max_position_embeddings=12),
    }[name]  # fmt: skip
    spelled = {"llama4": "Llama4Text", "smollm3": "SmolLM3", "cohere2": "Cohere2", "exaone4": "Exaone4"}
    spelled = spelled.get(name, "Ministral3")
    config = getattr(transformers, f"{spelled}Config")(**SIZES, **more)
    m = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return m, config, getattr(m, f"{spelled}Attention")


@pytest.mark.parametrize("name", ["llama4", "smollm3", "cohere2", "exaone4", "ministral3"])
def test_every_layer_is_the_models_own(name):
    """Norms lie between projections and attention in some of them: queries and keys come from a hook on the attention."""
    m, config, cls = layers_of(name)
    given, length = {}, 9

    def eager(module, query, key, value, attention_mask, **options):
        given.update(scaled=query, key=key, value=value, scaling=options["scaling"])
        given["out"] = m.eager_attention_forward(module, query, key, value, attention_mask, **options)[0]
        return given["out"], None

    m.ALL_ATTENTION_FUNCTIONS.register("posenc_layers", eager)
    config._attn_implementation = "posenc_layers"
    encodings = posenc.rope.by_layer(config)
    assert len(encodings) == 4
    x = torch.randn(2, length, 16, dtype=torch.float64)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, length, length).double().masked_fill(future, torch.finfo(torch.float64).min)
    kinds = set()
    for number, encoding in enumerate(encodings):
        config.use_qk_norm = False  # Llama 4's comes after the rotation, which it then is not part of
        original = cls(config, number).double().eval()
        for parameter in original.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        rotation = encoding.double().rotation(Positions(length))
        kinds.add(rotation is not None)
        phases = rotation or next(e for e in encodings if e.rotation(Positions(length))).double().rotation(Positions(3))
        cos, sin = phases.k if rotation else (torch.ones(1, length, 2).double(),) * 2
        if name == "llama4":
            embeddings = torch.polar(torch.ones_like(cos), torch.atan2(sin, cos))
        else:
            twice = (lambda y: y.repeat_interleave(2, -1)) if name == "cohere2" else (lambda y: torch.cat((y, y), -1))
            embeddings = twice(cos), twice(sin)
        more = {"position_ids": torch.arange(length)[None]} if name == "ministral3" else {}
        with oracle.wide(m), torch.no_grad():
            original(x, embeddings, mask, **more)
            q, k, v = (getattr(original, f"{side}_proj")(x).view(2, length, -1, 4).transpose(1, 2) for side in "qkv")
            if name == "exaone4":
                q, k = original.q_norm(q), original.k_norm(k)
        ours = posenc.attend(q, k, v, encoding.plan(Positions(length)), causal=True).transpose(1, 2)
        torch.testing.assert_close(ours, given["out"], rtol=0, atol=1e-10)
    assert kinds == ({True} if name == "ministral3" else {True, False})


@pytest.mark.parametrize("name", ["Ministral3", "Mistral4"])
def test_the_configuration_as_transformers_makes_it(name):
    """Its rotation's keys have the model's length among them."""
    import importlib

    import transformers

    config = getattr(transformers, f"{name}Config")()
    m = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    first, *others = posenc.rope.by_layer(config)
    assert all(other is first for other in others)
    at, keys = torch.arange(0, 40000, 400)[None], config.rope_parameters
    scale = m.get_llama_4_attn_scale(at, keys["llama_4_scaling_beta"], keys["original_max_position_embeddings"])
    plan = first.plan(Positions(at))
    torch.testing.assert_close(plan.scale.flatten() * first.head_dim**0.5, scale.flatten())
    for ours, theirs in zip(plan.rotate.q, getattr(m, f"{name}RotaryEmbedding")(config)(torch.zeros(1), at)):
        torch.testing.assert_close(
            ours, theirs[..., : ours.shape[-1]], rtol=0, atol=5e-3
        )  # theirs are float32 products


@pytest.mark.parametrize(
    ("name", "more", "rotated"),
    [
        ("Afmoe", {}, [1, 1, 1, 0]),
        ("Flint", {}, [0, 0, 1, 1]),
        ("Kolibri1", {}, [1, 1, 1, 1, 0]),
        ("MuseSparkText", {}, [1, 0, 1, 1, 1, 0]),
        ("MuseGlimmerText", {}, [1, 1, 1, 0]),
        ("GraniteMoeHybrid", {}, [0, 0]),
        ("GraniteMoeHybrid", {"position_embedding_type": "rope"}, [1, 1]),
    ],
)
def test_which_layers_rotate(name, more, rotated):
    """As `if` before the rotation in each model's attention of transformers has it."""
    import transformers

    made = posenc.rope.by_layer(getattr(transformers, f"{name}Config")(**more))
    assert [int(isinstance(each, posenc.RoPE)) for each in made[: len(rotated)]] == rotated


def test_several_bases_of_layers_are_refused():
    import transformers

    config = transformers.MuseGlimmerTextConfig(num_hidden_layers=3, layer_rope_theta=[1e4, 0, 1e6])
    with pytest.raises(posenc.OptionError, match="several bases"):
        posenc.rope.by_layer(config)


def test_layers_that_rotate_alike_share_one_encoding():
    _, config, _ = layers_of("cohere2")
    first, second, third, last = posenc.rope.by_layer(config)
    assert first is second is third
    assert isinstance(last, posenc.NoPosition)


def test_a_rotation_for_each_type_of_layer():
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(**SIZES, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    made = posenc.rope.by_layer(config)
    assert made[0] is made[2]
    assert (made[0].base, made[3].base) == (1e4, 1e6)


def test_the_log_form_has_no_steps():
    encoding = posenc.Tempered(head_dim=4, alpha=0.5, floor=4.0, form="log").double()
    expected = [1 + 0.5 * max(torch.tensor((i + 1) / 4).log().item(), 0.0) for i in range(9)]
    scale = encoding.plan(Positions(9)).scale
    torch.testing.assert_close(scale * 2, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_it_multiplies_a_scale_by_query_that_is_there_already():
    inner = posenc.Tempered(head_dim=4, alpha=0.5, floor=2.0)
    both = posenc.Tempered(head_dim=4, encoding=inner, alpha=0.3, floor=2.0)
    at = Positions(torch.tensor([[0, 3, 9]]))
    alone = posenc.Tempered(head_dim=4, alpha=0.3, floor=2.0).plan(at).scale
    torch.testing.assert_close(both.plan(at).scale, inner.plan(at).scale * alone * 2)


@pytest.mark.parametrize("options", [dict(floor=0.0), dict(form="linear"), dict(alpha="x"), dict(encoding=4)])
def test_bad_options(options):
    with pytest.raises(posenc.OptionError):
        posenc.Tempered(head_dim=4, **options)


@pytest.mark.parametrize("form", ["llama4", "ministral3", "log"])
def test_positions_before_the_first_have_its_temperature(form):
    """Left padding has such positions; their logarithm would be NaN."""
    encoding = posenc.Tempered(head_dim=8, alpha=0.5, floor=2.0, form=form)
    scale = encoding.plan(posenc.Positions(torch.arange(-9, 4))).scale
    assert scale.isfinite().all()
    assert (scale[:9] == scale[9]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("inner", ["none", "t5", "fox", "relative_logits"])
def test_half_precision_runs_fused_on_a_cpu(dtype, queries, inner):
    """The product of queries and temperatures is not rounded to half precision."""
    if inner == "relative_logits":
        encoding = every.make(inner, 64, 4, temper=(4.0, 0.5))
    else:
        encoding = posenc.Tempered(
            head_dim=16,
            heads=4,
            d_model=64,
            encoding=every.make(inner, 64, 4, **every.causal_options(inner)),
            floor=4.0,
            alpha=0.5,
        )
    layer = posenc.Attention(64, 4, kv_heads=2, encoding=encoding, causal=True).requires_grad_(False)
    x = torch.randn(2, 40, 64)
    rows = slice(40 - queries, 40)
    at = posenc.Positions(posenc.Run(40 - queries, queries), posenc.Run(0, 40))
    more = {"kept": Kept(encoding.keep(x))} if inner == "fox" else {}
    plan = encoding.plan(at, x=x[:, rows], host=layer, **more)
    q, k, v = (torch.randn(2, heads, 40, 16).to(dtype) for heads in (4, 2, 2))
    q, k, v = (t.requires_grad_() for t in (q[:, :, rows].clone(), k, v))
    assert posenc.explain(q, k, v, plan, causal=True).engine == "cpu"
    out = posenc.attend(q, k, v, plan, causal=True)
    assert out.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = posenc.attend(*exact, plan, causal=True, engine="reference")
    away = torch.randn_like(out)
    (out * away).sum().backward()
    (expected * away.double()).sum().backward()
    error = torch.finfo(dtype).eps
    for ours, theirs in ((out, expected), *((t.grad, e.grad) for t, e in zip((q, k, v), exact))):
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * error, atol=4 * error * theirs.abs().max().item())
