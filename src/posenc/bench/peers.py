"""Who attends. A peer says its version, what it can do, and gives a function of q, k, v that autograd can follow.

Peers share the scheme's own parameters, so that gradients can be compared too.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..dispatch import attend
from ..scheme import Scheme
from .workloads import HEADS, SIZE, Attention, Workload


class Peer:
    name = ""
    trains = True
    package: str | None = None

    def version(self) -> str | None:
        """None: not installed."""
        if self.package is None:
            return torch.__version__
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def refuses(self, workload: Workload, length: int) -> str | None:
        """Why it cannot do this, or None."""
        return None

    def make(self, workload: Workload, scheme: Scheme, length: int) -> Attention:
        raise NotImplementedError


class Plain(Peer):
    """PyTorch's attention without any position: what the ratios are relative to."""

    name = "plain"

    def make(self, workload, scheme, length):
        causal = workload.causal and workload.queries is None
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal)


class Ours(Peer):
    name = "posenc"

    def version(self):
        from .. import __version__

        return __version__

    def make(self, workload, scheme, length):
        where = workload.where(length)
        return lambda q, k, v: attend(q, k, v, scheme.plan(where), causal=workload.causal)


def dense_bias(workload: Workload, scheme: Scheme, length: int) -> Tensor:
    """[H, Lq, Lk] of a scheme that adds one number per head and distance."""
    plan = scheme.plan(workload.where(length))
    device = scheme._here.device
    distance = plan.where.distance(device)
    parts = []
    for lookup in plan.lookups:
        assert lookup.bias is not None
        parts.append(lookup.bias[:, lookup.index.look(distance)])
    if plan.slopes is not None:
        parts.append(-plan.slopes[:, None, None] * distance.abs())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.masked_fill(distance > 0, float("-inf")) if workload.causal else total


BIASES = ("t5", "clipped", "alibi")


class DenseBias(Peer):
    """A dense [H, L, L] bias given to PyTorch's attention as a mask: what most code does."""

    name = "dense bias"

    def refuses(self, workload, length):
        if workload.scheme not in BIASES:
            return "the term depends on the content"
        return _too_large(HEADS * length * (workload.queries or length) * 4 * 4)

    def make(self, workload, scheme, length):
        def attention(q, k, v):
            bias = dense_bias(workload, scheme, length).to(q.dtype)[None]
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=_scale(scheme))

        return attention


class Eager(Peer):
    """Scores, softmax, sum: three dense steps; content terms as the papers' formulas, vectors gathered by [L, L]."""

    name = "textbook"

    def refuses(self, workload, length):
        if workload.scheme in BIASES:
            return _too_large(HEADS * length * (workload.queries or length) * 4 * 6)
        if workload.scheme == "shaw":
            return _too_large(length * length * SIZE * 4 * (4 if workload.options.get("values") else 2))
        return "no textbook formula is written for it here"

    def make(self, workload, scheme, length):
        def bias(q, k, v):
            scale = _scale(scheme)
            scores = q @ k.transpose(-1, -2) * (SIZE**-0.5 if scale is None else scale)
            return (scores + dense_bias(workload, scheme, length).to(q.dtype)).softmax(-1) @ v

        def shaw(q, k, v):
            steps = torch.arange(length, device=q.device)
            rows = (steps[None, :] - steps[:, None]).clamp(-scheme.left, scheme.right) + scheme.left
            vectors = scheme.keys[0][rows]  # [L, L, d]
            scores = (q @ k.transpose(-1, -2) + torch.einsum("bhid,ijd->bhij", q, vectors)) * SIZE**-0.5
            weights = scores.softmax(-1)
            out = weights @ v
            if scheme.values is not None:
                out = out + torch.einsum("bhij,ijd->bhid", weights, scheme.values[0][rows])
            return out

        return shaw if workload.scheme == "shaw" else bias


class Flex(Peer):
    """PyTorch's FlexAttention, compiled; on a CPU it has no backward pass."""

    name = "flex attention"
    trains = False

    def refuses(self, workload, length):
        if workload.scheme not in ("t5", "clipped", "alibi"):
            return "no score function is written for it here"
        return None if workload.queries is None else "one query is left to decoding kernels"

    def make(self, workload, scheme, length):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        plan = scheme.plan(workload.where(length))
        device = scheme._here.device
        steps = torch.arange(-length + 1, length, device=device)
        if plan.slopes is None:
            (lookup,) = plan.lookups
            table = lookup.bias[:, lookup.index.look(steps)].detach().contiguous()
        else:
            table = (-plan.slopes[:, None] * steps.abs()).detach()

        def score(s, b, h, i, j):
            return s + table[h, j - i + length - 1]

        mask = None
        if workload.causal:
            mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, length, length, device=str(device))
        compiled = torch.compile(flex_attention)
        return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=mask, scale=_scale(scheme))


class XTransformers(Peer):
    """x-transformers' bias modules, with PyTorch's attention as its own `flash=True` does."""

    name = "x-transformers"
    package = "x-transformers"

    def refuses(self, workload, length):
        if workload.scheme not in ("t5", "alibi"):
            return "it has no such encoding"
        return _too_large(HEADS * length * (workload.queries or length) * 4 * 6)

    def make(self, workload, scheme, length):
        from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

        if workload.scheme == "alibi":
            module = AlibiPositionalBias(heads=HEADS, total_heads=HEADS).to(scheme._here.device)
        else:
            module = RelativePositionBias(scale=1.0, causal=workload.causal, heads=HEADS).to(scheme._here.device)
            module.relative_attention_bias.weight = scheme.table

        def attention(q, k, v):
            bias = module(q.shape[2], k.shape[2])[None].to(q.dtype)
            if workload.causal and q.shape[2] > 1:
                future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
                bias = bias.masked_fill(future, float("-inf"))
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=_scale(scheme))

        return attention


class Transformers(Peer):
    """The attention of transformers' own T5, DeBERTa-v2 and XLNet, from projected q, k, v on."""

    name = "transformers"
    package = "transformers"

    def refuses(self, workload, length):
        if workload.name not in ("t5", "t5-causal", "deberta", "transformer_xl"):
            return "it has no such attention"
        copies = {"deberta": 12, "transformer_xl": 10}.get(workload.name, 6)
        return _too_large(HEADS * length * length * 4 * copies)

    def make(self, workload, scheme, length):
        kind = {"deberta": self._deberta, "transformer_xl": self._xlnet}.get(workload.scheme, self._t5)
        return kind(workload, scheme, length)

    def _t5(self, workload, scheme, length):
        from transformers import T5Config
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.t5.modeling_t5 import T5Attention

        config = T5Config(d_model=HEADS * SIZE, num_heads=HEADS, d_kv=SIZE, is_decoder=workload.causal)
        module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(scheme._here.device)
        module.relative_attention_bias.weight = scheme.table

        def attention(q, k, v):
            bias = module.compute_bias(q.shape[2], k.shape[2])
            if workload.causal:
                future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
                bias = bias.masked_fill(future, float("-inf"))
            out, _ = sdpa_attention_forward(module, q, k, v, attention_mask=bias, scaling=1.0, is_causal=False)
            return out.transpose(1, 2)

        return attention

    def _deberta(self, workload, scheme, length):
        from transformers import DebertaV2Config
        from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

        config = DebertaV2Config(
            hidden_size=HEADS * SIZE,
            num_attention_heads=HEADS,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            share_att_key=False,
            position_buckets=scheme.table.shape[0] // 2,
            max_relative_positions=workload.options["max_distance"],
        )
        module = DisentangledSelfAttention(config).to(scheme._here.device).eval()
        module.pos_key_proj, module.pos_query_proj = scheme.pos_key, scheme.pos_query
        scale = (SIZE * 3) ** -0.5

        def attention(q, k, v):
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            scores = flat[0] @ flat[1].transpose(-1, -2) * scale
            scores = scores + module.disentangled_attention_bias(flat[0], flat[1], None, scheme.table, 3)
            return (scores.softmax(-1) @ flat[2]).unflatten(0, q.shape[:2])

        return attention

    def _xlnet(self, workload, scheme, length):
        from transformers import XLNetConfig
        from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

        from ..schemes.absolute import sinusoid

        config = XLNetConfig(d_model=HEADS * SIZE, n_head=HEADS, d_inner=64, dropout=0.0)
        module = XLNetRelativeAttention(config).to(scheme._here.device)
        module.r_w_bias, module.r_r_bias = scheme.u, scheme.v
        distances = torch.arange(length, -length, -1, device=scheme._here.device)
        waves = sinusoid(distances, HEADS * SIZE, base=10000.0, layout="concatenated")

        def attention(q, k, v):
            table = scheme.w_r(waves.to(q.dtype)).view(-1, 1, HEADS, SIZE)
            heads = [x.permute(2, 0, 1, 3) for x in (q, k, v)]
            return module.rel_attn_core(*heads, table.expand(-1, q.shape[0], -1, -1)).permute(1, 2, 0, 3)

        return attention


def _scale(scheme: Scheme) -> float | None:
    return getattr(scheme, "scale", None)


def _too_large(need: int) -> str | None:
    """Half of the free memory may be asked for; a GPU's own limit shows as its own error."""
    import psutil

    return f"needs about {need / 2**30:.0f} GiB" if need > psutil.virtual_memory().available / 2 else None


PEERS = {peer.name: peer for peer in (Plain(), Ours(), DenseBias(), Eager(), XTransformers(), Transformers(), Flex())}
