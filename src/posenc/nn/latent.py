"""LatentAttention: keys and values from a small latent, with a rotated part beside it (multi-head latent attention)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.encoding import Encoding, follow_assigned
from ..core.errors import OptionError
from ..core.mask import as_truth
from ..core.options import WIDEST, require_bool, require_int
from ..core.plan import Plan
from ..core.plan_checks import check_states
from ..core.rotation import Rotation
from ..core.torch_modes import call_like
from ..encodings.none import NoPosition
from ..encodings.rope.by_layer import rotation_alone, with_temperature
from ..encodings.rope.rope import RoPE
from ..encodings.rope.scaling import YaRN
from ..functional import attend
from .cache import KVCache, LayerCache, LayerKey, find_slot, is_training
from .sequence import keep_numbers, refuse_part, resolve_sequence


class LatentAttention(nn.Module):
    """Multi-head latent attention with decoupled rotary positions (DeepSeek-AI 2024, arXiv:2405.04434).

        c_j = norm(W_dkv x_j)                    the latent, [kv_rank]: all that is cached, with r_j
        r_j = R(j) W_kr x_j                      the rotated part of every head's key, [rope_dim]
        s_ij = (q^r_i · r_j + q^n_i · W_uk c_j) / sqrt(nope_dim + rope_dim),     v_j = W_uv c_j  [v_dim]

        prefill    keys [r, W_uk c] of nope_dim + rope_dim, values of v_dim             heads as usual
        decoding   q' = [q^r, W_ukᵀ q^n], keys [r, c], values c, then W_uv of the output one key head for all

    A rotation between q and W_uk would prevent multiplying the two ahead of time, so a separate part r is rotated.
    A step with few queries attends to the latents themselves (absorbed): the cache is never expanded.

    q_rank     the rank of the queries' projection; None: a full one
    encoding   rotates the rope_dim channels; default RoPE(rotary_dim=rope_dim, layout="interleaved"). It may add
               biases by distance, forgetting gates and sinks, but no term that reads queries, keys or values. Absolute
               encodings are added to the layer's input, as in `Attention`
    absorb     None: absorb where that takes fewer operations

    Parameters have the names of DeepSeek's layers in transformers, whose `state_dict` can be loaded as it is.

    x and the output are [B, L, d_model]. Raises OptionError for sizes that do not fit.

        >>> layer = posenc.LatentAttention(64, 4, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=8)
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self, d_model: int, heads: int, *, kv_rank: int = 512, q_rank: int | None = None, nope_dim: int = 128,
        rope_dim: int = 64, v_dim: int = 128, encoding: Encoding | None = None, causal: bool = True, bias: bool = False,
        eps: float = 1e-6, absorb: bool | None = None, engine: str = "auto", layer_idx: int | None = None,
    ):  # fmt: skip
        super().__init__()
        sizes = {"d_model": d_model, "heads": heads, "kv_rank": kv_rank, "nope_dim": nope_dim, "rope_dim": rope_dim}
        for name, size in {**sizes, "v_dim": v_dim, "q_rank": 1 if q_rank is None else q_rank}.items():
            require_int(name, size, least=1, most=WIDEST)
        if absorb is not None:
            require_bool("absorb", absorb)
        causal, bias = as_truth("causal", causal), as_truth("bias", bias)
        if encoding is None:
            encoding = RoPE(head_dim=nope_dim + rope_dim, rotary_dim=rope_dim, layout="interleaved")
        if not isinstance(encoding, Encoding):
            raise TypeError(f"encoding must be an Encoding or None, got {type(encoding).__name__}")
        self.d_model, self.heads, self.kv_rank, self.q_rank = d_model, heads, kv_rank, q_rank
        self.nope_dim, self.rope_dim, self.v_dim = nope_dim, rope_dim, v_dim
        self.encoding, self.causal, self.absorb, self.engine = encoding, causal, absorb, engine
        self.layer_idx, self.layer_key = layer_idx, LayerKey()
        self.register_load_state_dict_post_hook(follow_assigned)
        encoding.check_causal(causal)
        width = heads * (nope_dim + rope_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(d_model, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(d_model, q_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(q_rank, eps=eps)
            self.q_b_proj = nn.Linear(q_rank, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d_model, kv_rank + rope_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=eps)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, d_model, bias=bias)

    @classmethod
    def from_config(cls, config: Any, **more: Any) -> LatentAttention:
        """The layer of a DeepSeek V2 or V3 configuration of transformers (or of a model with the same fields).

        Raises OptionError for a model whose latents have factors of their own (LongCat-Flash).
        """
        kind = getattr(config, "model_type", "")
        if kind.startswith("longcat"):
            raise OptionError(
                f"{kind} multiplies its queries and latents by the square root of d_model over their rank, which this layer "
                "does not; multiply the weights of both layer norms by it, and make the layer with LatentAttention(...)"
            )
        sizes = dict(nope_dim=config.qk_nope_head_dim, rope_dim=config.qk_rope_head_dim, v_dim=config.v_head_dim)
        if "encoding" not in more:
            more["encoding"] = NoPosition() if kind in UNROTATED else _rotary(config)
        return cls(
            config.hidden_size, config.num_attention_heads, kv_rank=config.kv_lora_rank, q_rank=config.q_lora_rank,
            bias=config.attention_bias, **{**sizes, **more},
        )  # fmt: skip

    def forward(
        self, x: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None, key_mask: Tensor | None = None,
        documents: Tensor | None = None, cache: KVCache | LayerCache | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, L, d_model] -> [B, L, d_model]; the arguments are those of `Attention`."""
        check_states("x", x, self.d_model)
        slot = find_slot(cache, self, x, cross=False)
        sequence = resolve_sequence(
            self.encoding, x, cache=slot, positions=positions, key_mask=key_mask, documents=documents
        )
        if slot is not None and slot.length and self.encoding.embeds_whole:
            refuse_part(self.encoding, slot)
        x = self.encoding.embed(x, sequence.inputs)
        kept = keep_numbers(self.encoding, x, slot, sequence)
        kept_too: dict[str, Any] = {} if kept is None else {"kept": kept}
        plan = self.encoding.terms(sequence.all, x=x, **kept_too)
        self._check(plan)
        q = self._queries(x)
        latent, rotated = self.kv_a_proj_with_mqa(x).unsqueeze(1).split([self.kv_rank, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        follows_length = self.encoding.length_dependent
        rotation = self.encoding.rotation(sequence.all if follows_length else sequence.new)
        if rotation is not None:
            self._check_rotation(rotation)
            q = rotation.rotate_q(q)
            rotated = rotated if follows_length else rotation.rotate_k(rotated)
        appended = None
        if slot is not None:
            appended = slot.append(rotated, latent, differentiable=is_training(self, q))
            rotated, latent = appended.k, appended.v
        if rotation is not None and follows_length:
            rotated = rotation.rotate_k(rotated)
        scale = plan.scale_of(self.rope_dim + self.nope_dim)
        plan = replace(plan, scale=scale.squeeze(-1) if isinstance(scale, Tensor) else scale)
        masks = dict(causal=self.causal, key_mask=sequence.key_mask, documents=sequence.documents, mask=mask)
        run = self._absorbed if self._absorbs(slot, x.shape[1]) else self._expanded
        out = self.o_proj(run(q, rotated, latent, plan, masks).transpose(1, 2).flatten(2))
        if slot is not None and appended is not None:
            slot.commit(appended, sequence.marks)  # last: an error above leaves the cache unchanged
        return out

    if TYPE_CHECKING:

        @call_like(forward)
        def __call__(self, *args: Any, **options: Any) -> Tensor: ...

    def _queries(self, x: Tensor) -> Tensor:
        """[B, heads, L, rope_dim + nope_dim], the channels to be rotated first; the projections have them last."""
        q = self.q_proj(x) if self.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        nope, rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        return torch.cat((rope, nope), dim=-1)

    def _absorbs(self, slot: LayerCache | None, queries: int) -> bool:
        """Whether attention to the latents takes fewer operations: it costs each pair 2 kv_rank - nope_dim - v_dim more,
        and spares each key its expansion, kv_rank (nope_dim + v_dim)."""
        if self.absorb is not None:
            return self.absorb
        heads = self.nope_dim + self.v_dim
        return slot is not None and queries * (2 * self.kv_rank - heads) < self.kv_rank * heads

    def _expanded(self, q: Tensor, rotated: Tensor, latent: Tensor, plan: Plan, masks: dict) -> Tensor:
        expanded = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        nope, v = expanded.split([self.nope_dim, self.v_dim], dim=-1)
        k = torch.cat((rotated.expand(-1, self.heads, -1, -1), nope), dim=-1)
        return attend(q, k, v, plan, engine=self.engine, **masks)

    def _absorbed(self, q: Tensor, rotated: Tensor, latent: Tensor, plan: Plan, masks: dict) -> Tensor:
        weight = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))  # [heads, nope + v, rank]
        of_keys, of_values = weight.split([self.nope_dim, self.v_dim], dim=1)
        rope, nope = q.split([self.rope_dim, self.nope_dim], dim=-1)
        absorbed = torch.cat((rope, nope @ of_keys.to(nope.dtype)), dim=-1)
        k = torch.cat((rotated, latent), dim=-1)
        out = attend(absorbed, k, latent, plan, engine=self.engine, **masks)
        return out @ of_values.mT.to(out.dtype)

    def _check(self, plan: Plan) -> None:
        reads = [x for x in plan.lookups if not (x.dot_query is None and x.dot_key is None and x.add_value is None)]
        if reads or plan.shift is not None or plan.cosine is not None or plan.append is not None:
            raise OptionError(
                f"{type(self.encoding).__name__} reads queries, keys or values, which latent attention does not expand "
                "when it decodes; use a rotation, a bias by distance, slopes, forgetting gates or sinks"
            )

    def _check_rotation(self, rotation: Rotation) -> None:
        """Raise where a rotation does not fit the rotated part, [rope_dim] of one key for all heads, which is no value."""
        name = type(self.encoding).__name__
        if (
            rotation.values
            or rotation.polar
            or any(x is not None and x[0].dim() == 4 for x in (rotation.q, rotation.k))
        ):
            raise OptionError(
                f"{name} rotates values, or each head by its own angles, or widens its channels; latent attention has one "
                "rotated key for all heads: use RoPE, MRoPE, AxialRoPE, XPos or ManyAxes"
            )
        widths = [2 * x[0].shape[-1] for x in (rotation.q, rotation.k) if x is not None]
        if max(widths, default=0) > self.rope_dim:
            raise OptionError(
                f"{name} rotates {max(widths)} channels, and rope_dim is {self.rope_dim}; give it rotary_dim or head_dim="
                f"{self.rope_dim}"
            )


UNROTATED = ("kimi_linear",)
"""Models of transformers whose latent attention has no positions: the layers between have them."""


def _rotary(config: Any) -> Encoding:
    is_tempered = (config.rope_parameters or {}).get("llama_4_scaling_beta") is not None
    rope = rotation_alone(config) if is_tempered else RoPE.from_config(config)
    if isinstance(rope.scaling, YaRN) and rope.scaling.mscale_all_dim:
        # in transformers these layers multiply the scores themselves, and so does YaRN here with scale_scores
        scaling = replace(rope.scaling, scale_scores=True)
        same = {name: getattr(rope, name) for name in ("head_dim", "rotary_dim", "base", "layout")}
        rope = RoPE(**same, scaling=scaling)
    if not is_tempered:
        return rope
    return with_temperature(config, rope, config.qk_nope_head_dim + config.qk_rope_head_dim)
