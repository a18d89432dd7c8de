"""GPT-J and CodeGen: rotary, no term inside attention; scores in float32 by hand.

    s = q·k / sqrt(d),   causal

GPTJAttention._attn (modeling_gptj.py 134-160 of transformers 5.22) and CodeGenAttention._attn (112-136) call no interface: they make
all scores and a dense mask, [B, 1, L, L]. Only `_attn` is overridden. A mask that PyTorch's attention takes faster stays dense.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.codegen import modeling_codegen
from transformers.models.gptj import modeling_gptj

from .. import Plan, Positions
from . import interface, masks, rules
from .family import Family, tiny_model, tiny_text, variants
from .layer import Layer, Sample


class PlainAttention(Layer):
    """CodeGen divides its masks by sqrt(d) as well, and they stay masks."""

    encoding = "no term"
    relies_on = {"_attn": ("query", "key", "value", "attention_mask")}

    def posenc_sample(self, length: int) -> Sample:
        return self.num_attention_heads, self.head_dim, Plan(Positions(length)), {"causal": True}

    def forward(self, *args: Any, output_attentions: bool = False, **kwargs: Any) -> Any:
        layer: Any = self
        if output_attentions:  # a view of this layer with the original's `_attn`
            layer = object.__new__(self.original)  # copy.copy does not copy what fully_shard has sharded
            layer.__dict__.update(self.__dict__)
            return self.original.forward(layer, *args, output_attentions=True, **kwargs)
        return super().forward(*args, **kwargs)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Any, Any]:
        if masks.is_compact(attention_mask):
            options = masks.mask_options(attention_mask, query.shape[2], causal=True)
            positions = Positions((key.shape[2] - query.shape[2], query.shape[2]), key.shape[2])
            plan = Plan(positions, scale=self.head_dim**-0.5)
            fully_masked = masks.before_all_keys(options, query.shape[2])
            out = self.posenc_run(query, key, value, plan, options, self.attn_dropout.p, fully_masked)
            return out.unflatten(-1, (-1, value.shape[3])).transpose(1, 2), None
        if attention_mask is None or interface.are_collected():
            return super()._attn(query, key, value, attention_mask)  # type: ignore[misc]
        drop = self.attn_dropout.p if self.training else 0.0
        out, _ = interface.attention(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5, dropout=drop)
        return out.transpose(1, 2), None


def before_model(model: Any, args: tuple, kwargs: dict[str, Any]):
    kwargs = dict(masks.by_name(model, args, kwargs))
    tokens, cache, mask = masks.tokens_of(kwargs), kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if masks.wants_attentions(model, kwargs) or tokens is None or not masks.grows(cache):
        return (), kwargs
    keys = masks.past(cache) + tokens.shape[1]
    is_plain = mask is None or mask.dim() == 2
    if is_plain and not interface.prefers_original(model, tokens.shape[1], keys, tokens.device, few=rules.MASKED):
        kwargs["attention_mask"] = masks.padding(mask, keys, tokens.device, model)
    return (), kwargs


PARTS = variants(PlainAttention, "gptj.GPTJAttention", "codegen.CodeGenAttention")


def tiny(folder: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    sizes = dict(
        vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4, bos_token_id=1, eos_token_id=1
    )
    return tiny_model("GPTJ" if folder == "gptj" else "CodeGen", **{**sizes, **options}), tiny_text()


HOOKS = {modeling_gptj.GPTJModel: before_model, modeling_codegen.CodeGenModel: before_model}
FAMILY = Family(tiny, parts=PARTS, hooks=HOOKS)
