"""Scalings against transformers' own functions, the worked numbers, and the equivalences."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, modeling_rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import posenc
from posenc import scaling
from posenc.encodings.rope.scaling import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    Linear,
    Llama3,
    LongRoPE,
    MixedNTK,
    Proportional,
    YaRN,
    frequencies,
)
from tests import oracle, seeds
from tests.oracle import assert_rotated

SHORT = [1.0 + 0.01 * c for c in range(16)]
LONG = [1.0 + c * c / 4 for c in range(16)]
RECIPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-options": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0,
        "beta_slow": 2.0, "truncate": False, "mscale": 0.707, "mscale_all_dim": 1.0,
    },
    "yarn-factor": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.3,
    },
    "yarn-null-factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    "longrope": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 512,
    },
    "longrope-factor": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 512,
        "factor": 16.0,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}  # fmt: skip


@pytest.fixture
def wide():
    """transformers' formulas without float32's rounding."""
    with oracle.wide(modeling_rope_utils):
        yield


def config_of(recipe, **more):
    return LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **recipe}, **more,
    )  # fmt: skip


@pytest.mark.parametrize("total", [None, 300, 5000])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "default"])
def test_frequencies_equal_transformers(name, total, wide):
    config = config_of(RECIPES[name])
    kind = RECIPES[name]["rope_type"]
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=total)
    for source in (
        config,
        config.to_dict(),
        {**config.to_dict(), "rope_scaling": RECIPES[name], "rope_parameters": None},
    ):
        rope = posenc.rope.from_config(source)
        ours = torch.tensor(rope.frequencies(total), dtype=torch.float64)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0.0)
        assert rope.attention_factor == pytest.approx(magnitude, rel=1e-12)
    assert {recipe["rope_type"] for recipe in RECIPES.values() if recipe} == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("name", RECIPES)
def test_rotated_queries_and_keys_equal_transformers(name):
    config = config_of(RECIPES[name])
    if name == "dynamic":
        config.max_position_embeddings = 8
    q, k = torch.randn(2, 2, 2, 11, 32)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(11)[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    rope = posenc.rope.from_config(config)
    for x, ours, other in zip((q, k), rope.rotation(posenc.Positions(11)).rotate_qk(q, k), theirs, strict=True):
        assert_rotated(ours, other, x, 11, rope.attention_factor)


@settings(max_examples=25, deadline=None)
@given(
    shift=st.integers(-(2**20), 2**20), name=st.sampled_from([n for n in RECIPES if "long" not in n and n != "dynamic"])
)
def test_only_differences_of_positions_matter(shift, name):
    rope = posenc.rope.from_config(config_of(RECIPES[name])).double()
    generator = seeds.generator(0)
    q, k = torch.randn(2, 1, 2, 7, 32, generator=generator, dtype=torch.float64)
    there = posenc.scores(q, k, rope.plan(posenc.Positions((shift, 7))))
    torch.testing.assert_close(there, posenc.scores(q, k, rope.plan(posenc.Positions(7))), atol=1e-11, rtol=1e-11)


def test_partial_rotary_uses_the_rotated_width(wide):
    config = config_of({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
                        "partial_rotary_factor": 0.5})  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = posenc.rope.from_config(config).frequencies()
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=1e-12, atol=0.0)


def test_scaling_by_one_changes_nothing():
    plain = frequencies(32, 500000.0)
    ones = (1.0,) * 16
    for same in (
        Linear(factor=1), NTK(factor=1), DynamicNTK(original=64), DynamicNTK(factor=4.0, original=64),
        YaRN(factor=1.0, original=64), YaRN(factor=1.0, original=64, ramp="paper"), Llama3(factor=1.0),
        LongRoPE(short=ones, long=ones, original=64), Proportional(fraction=1.0), MixedNTK(factor=1.0),
        MixedNTK(factor=1.0, b=0.5), DynamicYaRN(original=64),
    ):  # fmt: skip
        assert frequencies(32, 500000.0, same, 64) == pytest.approx(plain, rel=1e-15), same
        assert same.magnitude == 1.0
        assert same.score_factor == 1.0
    assert set(frequencies(32, 1e4, Proportional(fraction=0.0))) == {0.0}


def test_worked_numbers():
    assert frequencies(8, 1e4, NTK(factor=4)) == pytest.approx([1.0, 0.0629961, 0.00396850, 0.00025], rel=1e-5)
    for factor, total, stretch in ((1, 4096, 2), (2, 4096, 3), (4, 4096, 5), (1, 8192, 4), (2, 8192, 7), (4, 8192, 13)):
        ours = frequencies(8, 1e4, DynamicNTK(factor=factor, original=2048), total)
        assert ours == pytest.approx(frequencies(8, 1e4, NTK(factor=stretch)), rel=1e-15)
    plain = frequencies(128, 1e4)
    code = frequencies(128, 1e4, YaRN(factor=16, original=4096))
    paper = frequencies(128, 1e4, YaRN(factor=16, original=4096, ramp="paper"))
    at = range(16, 51, 4)
    assert [code[c] / plain[c] for c in at] == pytest.approx(
        [1.0, 1.0, 0.855769, 0.711538, 0.567308, 0.423077, 0.278846, 0.134615, 0.0625], rel=1e-5)  # fmt: skip
    assert [paper[c] / plain[c] for c in at] == pytest.approx(
        [1.0, 1.0, 0.655691, 0.38284, 0.229405, 0.143122, 0.094601, 0.067316, 0.0625], rel=1e-5)  # fmt: skip
    assert YaRN(factor=16, original=4096).magnitude == pytest.approx(1.2772588722239782, rel=1e-15)
    ratios = [a / b for a, b in zip(frequencies(128, 5e5, Llama3()), frequencies(128, 5e5), strict=True)]
    assert ratios[28:37] == pytest.approx(
        [1.0, 0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211, 0.125, 0.125], rel=1e-5)  # fmt: skip
    one = (1.0,) * 4
    assert LongRoPE(short=one, long=one, original=4096, factor=32).magnitude == pytest.approx(1.1902380714238083)
    sharp = Llama3(factor=16.0, low=1.0, high=1.0)
    assert all(math.isfinite(x) for x in frequencies(128, 5e5, sharp))


def test_golden_frequencies():
    """Stored with the configuration that made them, so that a change of any formula shows."""
    stored = json.loads((Path(__file__).parents[2] / "data" / "rope_frequencies.json").read_text())
    assert len(stored["entries"]) >= 12
    for entry in stored["entries"]:
        rope = posenc.rope.from_config(entry["config"])
        assert rope.frequencies(entry["total"]) == pytest.approx(entry["frequencies"], rel=1e-12, abs=0.0), entry[
            "config"
        ]
        assert rope.attention_factor == pytest.approx(entry["attention_factor"], rel=1e-9)


@pytest.mark.parametrize("extension", [
    DynamicNTK(factor=2.0, original=8), LongRoPE(short=(1.0,) * 8, long=tuple(range(1, 9)), original=8, factor=4.0),
    DynamicYaRN(original=8, beta_fast=2.0, beta_slow=0.5),
])  # fmt: skip
def test_prefill_equals_token_by_token(extension):
    rope = posenc.RoPE(head_dim=16, scaling=extension)
    assert rope.length_dependent
    attention = posenc.Attention(32, 2, encoding=rope, causal=True)
    x = torch.randn(2, 20, 32)
    for steps in ([1] * 20, [7, 1, 1, 5, 6]):
        cache, at, last = posenc.KVCache(), 0, None
        for step in steps:
            last = attention(x[:, at : at + step], cache=cache)
            at += step
            whole = attention(x[:, :at])[:, -1]  # the model of this length, without a cache
            torch.testing.assert_close(last[:, -1], whole, atol=1e-5, rtol=1e-5)


def test_dynamic_yarn_is_yarn_of_its_length():
    """As the authors' code does it: the factor is the length over the original one, from the longest length on."""
    for longest in (None, 4096):
        moving = DynamicYaRN(original=1024, max_length=longest)
        for total in (10, 1024, 3000, 4096, 5000, 20000):
            factor = max(total, longest or 1024) / 1024
            fixed = YaRN(factor=factor, original=1024)
            assert frequencies(64, 1e4, moving, total) == frequencies(64, 1e4, fixed)
            assert moving.magnitude_at(total) == fixed.magnitude == (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
            frozen = DynamicYaRN(original=1024, max_length=longest, freeze_at=total)
            assert frequencies(64, 1e4, frozen, 7) == frequencies(64, 1e4, fixed)
            assert frozen.magnitude == frozen.magnitude_at(99999) == fixed.magnitude
    positions = torch.tensor([[0, 1, 2], [5000, 5001, 5002]])  # two rows, two lengths, two magnitudes
    rope = posenc.RoPE(head_dim=64, scaling=moving).double()
    cos, sin = rope.rotation(posenc.Positions(positions)).q
    size = (cos**2 + sin**2).sqrt()
    for row, total in enumerate((3, 5003)):
        torch.testing.assert_close(size[row], torch.full((3, 32), moving.magnitude_at(total), dtype=torch.float64))


@pytest.mark.parametrize("frozen", [
    DynamicNTK(factor=2.0, original=8, freeze_at=16),
    LongRoPE(short=(1.0,) * 8, long=tuple(range(1, 9)), original=8, freeze_at=16),
])  # fmt: skip
def test_freezing_is_a_choice(frozen):
    rope = posenc.RoPE(head_dim=16, scaling=frozen)
    assert not rope.length_dependent
    assert rope.frequencies(3) == rope.frequencies(16) == rope.frequencies(1000)
    free = DynamicNTK(factor=2.0, original=8) if isinstance(frozen, DynamicNTK) else LongRoPE(
        short=frozen.short, long=frozen.long, original=8)  # fmt: skip
    assert rope.frequencies() == posenc.RoPE(head_dim=16, scaling=free).frequencies(16)


def test_lengths_on_a_device_give_the_same_frequencies():
    w = frequencies(16, 1e4)
    totals = torch.tensor([[4.0], [8.0], [9.0], [100.0]], dtype=torch.float64)
    for extension in (
        DynamicNTK(factor=2.0, original=8), LongRoPE(short=[1.0] * 8, long=range(1, 9), original=8),
        DynamicYaRN(original=8, beta_fast=2.0, beta_slow=0.5), DynamicYaRN(original=8, max_length=9, beta_fast=2.0),
    ):  # fmt: skip
        ours = extension.frequencies_of(w, 16, 1e4, totals)
        magnitudes = torch.as_tensor(extension.magnitude_at(totals), dtype=torch.float64).expand(4, 1)
        for row, total in zip(magnitudes.flatten().tolist(), (4, 8, 9, 100), strict=True):
            assert row == pytest.approx(extension.magnitude_at(total), rel=1e-14)
        for row, total in zip(ours, (4, 8, 9, 100), strict=True):
            assert row.tolist() == pytest.approx(extension.frequencies(w, 16, 1e4, total), rel=1e-14)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Linear(factor=0), "positive"),
    (lambda: NTK(factor=float("nan")), "positive"),
    (lambda: YaRN(factor=2, original=64, ramp="linear"), "'paper'"),
    (lambda: YaRN(factor=2, original=64, beta_fast=1, beta_slow=32), "swap"),
    (lambda: LongRoPE(short=[1.0], long=[1.0, 2.0], original=64), "each pair"),
    (lambda: Proportional(fraction=1.5), "between 0"),
    (lambda: DynamicYaRN(original=64, max_length=32), "max_length"),
    (lambda: DynamicYaRN(original=64, beta_fast=1, beta_slow=32), "swap"),
    (lambda: MixedNTK(factor=2.0, b=0), "positive"),
    (lambda: frequencies(2, 1e4, NTK(factor=2)), "more than 2"),
    (lambda: frequencies(8, 1e4, LongRoPE(short=[1.0], long=[1.0], original=64)), "pairs"),
])  # fmt: skip
def test_says_what_is_wrong(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_score_factor_reaches_the_plan():
    extension = YaRN(factor=40, original=4096, mscale=1.0, mscale_all_dim=1.0, scale_scores=True)
    plan = posenc.RoPE(head_dim=192, rotary_dim=64, scaling=extension).plan(posenc.Positions(3))
    assert extension.magnitude == 1.0
    assert plan.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_module_is_public():
    assert posenc.scaling is scaling


def test_left_padding_is_not_counted():
    """Each row has the frequencies of its own length, whatever the batch is padded to."""
    rope = posenc.RoPE(head_dim=16, scaling=DynamicNTK(factor=2.0, original=8))
    attention = posenc.Attention(32, 2, encoding=rope, causal=True)
    x = torch.randn(2, 20, 32)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = False
    both = attention(x, key_mask=mask)
    torch.testing.assert_close(both[0, 7:], attention(x[:1, 7:])[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both[1], attention(x[1:])[0], atol=1e-5, rtol=1e-5)
    cache = posenc.KVCache()
    attention(x[:, :15], key_mask=mask[:, :15], cache=cache)
    last = attention(x[:, 15:], key_mask=mask[:, 15:], cache=cache)
    torch.testing.assert_close(last, both[:, 15:], atol=1e-5, rtol=1e-5)
