"""SpeechT5's encoder and VITS's text encoder: vectors for distances, on keys (SpeechT5) or on keys and values (VITS).

    SpeechT5   s = q·(k_j + a[δ(i - j)]) / sqrt(d)                    δ clips to -max .. max - 1; one table for all layers
    VITS       s = q·(k_j + a[j - i]) / sqrt(d),  o = Σ p (v_j + b[j - i])         0 outside of a window of 4 tokens

Their layers call no interface. Replaces SpeechT5Attention (modeling_speecht5.py 837-986 of transformers 5.22) in the encoder, and
SpeechT5RelativePositionalEncoding (425-441), which makes [L, L, d]; and VitsAttention (modeling_vits.py 844-997), which pads and
shifts scores [B H, L, 2 L]. SpeechT5's decoder has its positions at the input, and stays.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.speecht5 import modeling_speecht5
from transformers.models.vits import modeling_vits

from .. import Index, Lookup, Plan, Positions
from ..core import index
from ..core.tables import expand_table
from . import masks, rules
from .family import Family, tiny_text
from .layer import Layer, Part, Sample, split, zeros_beside

SHORT = 2.5
"""VITS's original is faster up to 256 tokens on a CPU, 160 times 2.5 ** 0.5; ms of a layer: forward 3.5 against 3.9 at 256, 12.5
against 7.9 at 512, with the backward pass 11.8 against 10.7 and 36.7 against 24.2. So is SpeechT5's with several rows, which share
its [L, L, d]: three layers, 4 times 250 frames, 356 ms against 366, a training step 1595 against 1650."""


class SpeechT5Attention(Layer, modeling_speecht5.SpeechT5Attention):
    original = modeling_speecht5.SpeechT5Attention
    encoding = "shaw"
    relies_on = {
        "forward": (
            "hidden_states", "key_value_states", "past_key_values", "attention_mask", "position_bias", "output_attentions",
        )
    }  # fmt: skip

    @staticmethod
    def concerns(module: Any) -> bool:
        return not module.is_decoder

    def posenc_plan(self, length: int, table: Tensor) -> Plan:
        lookup = Lookup(_clip(table), dot_query=table[None])
        return Plan(Positions(length), lookups=(lookup,), scale=self.scaling)

    def posenc_sample(self, length: int) -> Sample:
        return self.num_heads, self.head_dim, self.posenc_plan(length, zeros_beside(self.q_proj, 4, self.head_dim)), {}

    def forward(
        self, hidden_states, key_value_states=None, past_key_values=None, attention_mask=None, position_bias=None,
        output_attentions=False, **kwargs,
    ):  # fmt: skip
        is_table = position_bias is not None and position_bias.dim() == 2
        if output_attentions and is_table:
            length = hidden_states.shape[1]
            rows = expand_table(position_bias[None], _clip(position_bias), 1 - length, length - 1)[0]
            position_bias = rows.unfold(0, length, 1).flip(0).transpose(1, 2)
        if output_attentions or not is_table:
            given = (hidden_states, key_value_states, past_key_values, attention_mask, position_bias, output_attentions)
            return super().forward(*given, **kwargs)
        q, k, v = (split(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        plan = self.posenc_plan(q.shape[2], position_bias)
        options = masks.mask_options(attention_mask, q.shape[2], causal=False)
        return self.out_proj(self.posenc_run(q, k, v, plan, options, self.dropout)), None


def _clip(table: Tensor) -> Index:
    """Query minus key, clipped to -max .. max - 1: DeBERTa's without logarithms."""
    return index.deberta_buckets(table.shape[0] // 2)


class SpeechT5Positions(Part, modeling_speecht5.SpeechT5RelativePositionalEncoding):
    original = modeling_speecht5.SpeechT5RelativePositionalEncoding

    def forward(self, hidden_states):
        return super().forward(hidden_states) if _is_short(self, hidden_states) else self.pe_k.weight


class VitsAttention(Layer, modeling_vits.VitsAttention):
    original = modeling_vits.VitsAttention
    encoding = "shaw"
    relies_on = {"forward": ("hidden_states", "key_value_states", "attention_mask", "output_attentions")}

    @staticmethod
    def concerns(module: Any) -> bool:
        return bool(module.window_size)

    def posenc_plan(self, length: int) -> Plan:
        reach = self.window_size + 1
        keys, values = (nn.functional.pad(table, (0, 0, 1, 1)) for table in (self.emb_rel_k, self.emb_rel_v))
        lookup = Lookup(index.clip(reach, reach), dot_query=keys, add_value=values)
        return Plan(Positions(length), lookups=(lookup,), scale=self.scaling)

    def posenc_sample(self, length: int) -> Sample:
        return self.num_heads, self.head_dim, self.posenc_plan(length), {}

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, output_attentions=False):
        if output_attentions or _is_short(self, hidden_states):
            return super().forward(hidden_states, key_value_states, attention_mask, output_attentions)
        q, k, v = (split(f(hidden_states), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        options = masks.mask_options(attention_mask, q.shape[2], causal=False)
        return self.out_proj(self.posenc_run(q, k, v, self.posenc_plan(q.shape[2]), options, self.dropout)), None


def _is_short(module: Any, tokens: Tensor) -> bool:
    is_vits = isinstance(module, (VitsAttention, modeling_vits.VitsEncoder))
    shares_table = tokens.shape[0] > 1
    return masks.is_short(module, tokens, few=int((SHORT if is_vits or shares_table else 1.0) * rules.BIASED))


def before_encoder(encoder: Any, args: tuple, kwargs: dict[str, Any]):
    kwargs = dict(masks.by_name(encoder, args, kwargs))
    states, mask = kwargs["hidden_states"], kwargs.get("attention_mask")
    if not masks.wants_attentions(encoder, kwargs) and not _is_short(encoder, states):
        kwargs["attention_mask"] = masks.padding(mask, states.shape[1], states.device)
    return (), kwargs


class Text(nn.Module):
    """VITS's text encoder; the rest of the model draws random numbers."""

    def __init__(self, encoder: Any):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> tuple[Tensor]:
        return (self.encoder(input_ids, attention_mask[..., None].float(), attention_mask, **kwargs).last_hidden_state,)


def tiny(folder: str) -> tuple[Any, dict[str, Any]]:
    from transformers import SpeechT5Config, VitsConfig

    if folder == "vits":
        config: Any = VitsConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16, window_size=4,
            flow_size=8, layerdrop=0.0, attn_implementation="eager",
        )  # fmt: skip
        text = tiny_text(266)
        return Text(modeling_vits.VitsTextEncoder(config)), text
    config = SpeechT5Config(
        vocab_size=32, hidden_size=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=16,
        encoder_max_relative_position=12, encoder_layerdrop=0.0, max_text_positions=180, decoder_layers=1,
        decoder_attention_heads=2, decoder_ffn_dim=16,
    )  # fmt: skip
    text = tiny_text()
    return modeling_speecht5.SpeechT5EncoderWithTextPrenet(config), {"input_values": text.pop("input_ids"), **text}


HOOKS = {modeling_speecht5.SpeechT5Encoder: before_encoder, modeling_vits.VitsEncoder: before_encoder}
FAMILY = Family(tiny, parts=(SpeechT5Attention, SpeechT5Positions, VitsAttention), hooks=HOOKS)
