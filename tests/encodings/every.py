"""Every encoding by name with small sizes, for tests that hold for all."""

import torch

import posenc
from posenc.encodings.registry import causal_options, options_of

OPTIONS = {
    "learned": {"max_length": 64}, "deberta": {"max_distance": 8}, "relative_logits": {"max_distance": 6, "d_rel": 4},
    "axial": {"columns": 4}, "sinusoidal_2d": {"columns": 4},
    "cape": {"shift": 0.0, "jitter": 0.0}, "tupe": {"max_length": 64},
    "fire": {"threshold": 4.0, "hidden": 5}, "tempered": {"alpha": 0.5, "floor": 2.0},
    "grid_bias": {"window": (4, 4)}, "continuous_bias": {"window": (4, 4), "hidden": 6}, "decomposed": {"grid": (4, 4)},
    "mixed_rope": {"columns": 4}, "many_axes": {"axis_of": (0, 1), "text": True},
}  # fmt: skip
NAMES = posenc.list_encodings()
BOTH_SIDES = [name for name in NAMES if not posenc.info(name).load().causal_only]
"""Encodings that a layer without a causal mask may use."""
KINKS = ("continuous_bias", "fire", "pope")
"""Encodings that start where no gradient is: ReLUs with a bias of zero, a clamp at its bound."""
LIMITS = {"learned": 64, "tupe": 64, "grid_bias": 16, "continuous_bias": 16, "decomposed": 16, "xpos": 8192}


def furthest(name):
    """How far positions may go: past a million for all but those with a limit."""
    return LIMITS.get(name, 1_000_012)


def make(name, d_model=16, heads=4, **options):
    """An encoding whose tables are not zero, so that a wrong look-up shows."""
    if "std" in options_of(name):
        options.setdefault("std", 0.5)
    encoding = posenc.create(name, d_model=d_model, heads=heads, **{**OPTIONS.get(name, {}), **options})
    if name in KINKS:
        for parameter in encoding.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return encoding


def layer(name, d_model=16, heads=4, causal=True, **options):
    """An attention layer with that encoding; grouped queries where the encoding allows them."""
    kv_heads = heads if name in ("deberta", "mixed_rope", "pope", "tupe") else heads // 2
    encoding = make(name, d_model, heads, **(causal_options(name) if causal else {}))
    return posenc.Attention(d_model, heads, kv_heads=kv_heads, encoding=encoding, causal=causal, **options)
