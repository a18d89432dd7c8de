"""FastSpeech2-Conformer, Parakeet and Nemotron's streaming encoder: Transformer-XL's terms (conformer.py) in layers of their own.

    s = [ (q + u)·k_j + (q + v)·W_R R(i - j) ] / sqrt(d)

FastSpeech2ConformerAttention (modeling_fastspeech2_conformer.py 354-463 of transformers 5.22) calls no interface. Parakeet's layer does,
but hands it the second term as a mask, [B, H, L, L]; its forward is what is replaced. In Parakeet a padded frame sees nothing: the
original gives it the mean of all values. Nemotron's layer is Parakeet's with a cache, whose frames come first, and a mask of chunks,
which stays dense:

    cached frames    new frames            keys     0 .. Lk - 1
    . . . . . . .    q q q q               queries  Lk - Lq .. Lk - 1
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer
from transformers.models.parakeet import modeling_parakeet

from .. import Plan, Positions
from . import interface, masks, rules
from .conformer import plan_waves
from .family import SIZES, Family, InterfaceLayer, tiny_text, variants
from .interface_mask import Mask, nothing_padded
from .layer import Layer, Sample, split, zeros_beside

SHORT, SHORT_TRAINED = 16.0, 60.0
"""FastSpeech2's original (two heads of 192) is faster up to 640 frames on a CPU, 160 times 16 ** 0.5, and with gradients up to 1239; ms of
two layers: forward 273 against 279 at 600 frames, 578 against 545 at 1200; a training step 774 against 792, 1725 against 1761."""


class FastSpeech2ConformerAttention(Layer, modeling_fastspeech2_conformer.FastSpeech2ConformerAttention):
    original = modeling_fastspeech2_conformer.FastSpeech2ConformerAttention
    encoding = "transformer_xl"
    relies_on = {"forward": ("hidden_states", "attention_mask", "pos_emb", "output_attentions")}

    def posenc_plan(self, length: int, waves: Tensor) -> Plan:
        table = self.linear_pos(waves)
        return plan_waves(Positions(length), table, self.pos_bias_u, self.pos_bias_v, self.head_dim**-0.5)

    def posenc_sample(self, length: int) -> Sample:
        waves = zeros_beside(self.linear_q, 2 * length - 1, self.hidden_size)
        return self.num_heads, self.head_dim, self.posenc_plan(length, waves), {}

    def forward(self, hidden_states, attention_mask=None, pos_emb=None, output_attentions=False):
        times = SHORT_TRAINED if torch.is_grad_enabled() else SHORT
        if output_attentions or masks.is_short(self, hidden_states, few=int(times * rules.BIASED)):
            return super().forward(hidden_states, attention_mask, pos_emb, output_attentions)
        q, k, v = (split(f(hidden_states), self.head_dim) for f in (self.linear_q, self.linear_k, self.linear_v))
        real = None if attention_mask is None else attention_mask[:, 0] != 0
        options = {"key_mask": None if real is None or nothing_padded(real) else real}
        plan = self.posenc_plan(q.shape[2], pos_emb[0])
        return self.linear_out(self.posenc_run(q, k, v, plan, options, self.dropout.p)), None


def prefers_original(module: Any, queries: int, keys: int, device: torch.device) -> bool:
    drops = module.attention_dropout
    return interface.prefers_original(module, queries, keys, device, kind="transformer_xl", dropout=drops)


def forward(module: Any, original: Callable, hidden_states, position_embeddings, attention_mask=None, **kwargs):
    length = hidden_states.shape[1]
    if kwargs.get("output_attentions") or prefers_original(module, length, length, hidden_states.device):
        return original(hidden_states, position_embeddings, attention_mask=attention_mask, **kwargs)
    q, k, v = (split(f(hidden_states), module.head_dim) for f in (module.q_proj, module.k_proj, module.v_proj))
    real = None if attention_mask is None else attention_mask[:, 0].diagonal(dim1=-2, dim2=-1)
    mask = None
    if real is not None and not nothing_padded(real):
        sizes = (0, length), (0, length)
        mask = Mask(len(q), *sizes, real, causal=False, window=None, documents=None, device=q.device)
    out, probabilities = interface.attention(
        module, q, k, v, mask, scaling=module.scaling, dropout=module.attention_dropout if module.training else 0.0,
        position_bias=position_embeddings, **kwargs,
    )  # fmt: skip
    if mask is not None:
        mean = v.mean(2).repeat_interleave(module.num_key_value_groups, dim=1)
        out = torch.where(real[:, :, None, None], out, mean[:, None])  # type: ignore[index]
    return module.o_proj(out.flatten(2)), probabilities


def forward_streaming(
    module: Any, original: Callable, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
):  # fmt: skip
    length = hidden_states.shape[1]
    keys = (position_embeddings.shape[1] + 1) // 2
    if kwargs.get("output_attentions") or prefers_original(module, length, keys, hidden_states.device):
        return original(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    q, k, v = (split(f(hidden_states), module.head_dim) for f in (module.q_proj, module.k_proj, module.v_proj))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    out, probabilities = interface.attention(
        module, q, k, v, attention_mask, scaling=module.scaling,
        dropout=module.attention_dropout if module.training else 0.0, position_bias=position_embeddings, **kwargs,
    )  # fmt: skip
    return module.o_proj(out.flatten(2)), probabilities


def plan(positions: Positions, *, module: Any, waves: Tensor) -> Plan:
    return plan_waves(positions, module.relative_k_proj(waves[0]), module.bias_u, module.bias_v, module.scaling)


class Parakeet(InterfaceLayer):
    original = modeling_parakeet.ParakeetEncoderAttention
    encoding = "transformer_xl"
    relies_on = {"forward": ("hidden_states", "position_embeddings", "attention_mask")}
    attributes = ("q_proj", "k_proj", "v_proj", "o_proj", "relative_k_proj", "bias_u", "bias_v", "head_dim", "scaling")
    replaces = {"forward": forward}

    @classmethod
    def plan_of(cls, module, position_bias, scaling, query, kwargs):
        return None if position_bias is None else partial(plan, module=module, waves=position_bias)

    @staticmethod
    def sample(module, length):
        waves = zeros_beside(module.q_proj, 1, 2 * length - 1, module.q_proj.in_features)
        made = plan(Positions(length), module=module, waves=waves)
        return module.config.num_attention_heads, module.head_dim, made, {}


class Streaming(Parakeet):
    relies_on = {"forward": ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")}
    replaces = {"forward": forward_streaming}


STREAMING = variants(Streaming, "nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention")


class Phonemes(nn.Module):
    """FastSpeech2-Conformer's encoder; the model around it predicts how long its output is."""

    def __init__(self, encoder: Any):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> tuple[Tensor]:
        return (self.encoder(input_ids, attention_mask[:, None], return_dict=True, **kwargs).last_hidden_state,)


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    from transformers import FastSpeech2ConformerConfig, ParakeetEncoderConfig

    if folder == "fastspeech2_conformer":
        config = FastSpeech2ConformerConfig(
            vocab_size=32, hidden_size=16, encoder_layers=2, encoder_num_attention_heads=2, encoder_linear_units=16,
            encoder_kernel_size=3,
        )  # fmt: skip
        cls = modeling_fastspeech2_conformer.FastSpeech2ConformerEncoder
        encoder = cls(config, config.encoder_config, use_encoder_input_layer=True)
        return Phonemes(encoder), tiny_text(650)
    sizes: Any = dict(
        **SIZES, conv_kernel_size=3, num_mel_bins=16, subsampling_conv_channels=4, scale_input=False, layerdrop=0.0
    )
    if folder == "parakeet":
        encoder = modeling_parakeet.ParakeetEncoder(ParakeetEncoderConfig(**sizes))
    else:
        from transformers import NemotronAsrStreamingEncoder, NemotronAsrStreamingEncoderConfig

        sizes.update(num_key_value_heads=2, sliding_window=21, default_num_lookahead_tokens=2)
        encoder = NemotronAsrStreamingEncoder(NemotronAsrStreamingEncoderConfig(**sizes))
    mask = torch.ones(2, 1340, dtype=torch.long)
    mask[1, 900:] = 0
    return encoder, {"input_features": torch.randn(2, 1340, 16), "attention_mask": mask}


FAMILY = Family(tiny, parts=(FastSpeech2ConformerAttention, Parakeet, *STREAMING))
