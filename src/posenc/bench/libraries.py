"""Third-party libraries as peers: optional, called with projected q, k, v and their recommended settings."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .peers import Peer, scale_of


class Library(Peer):
    """A package, whose name is that of the peer."""

    def version(self):
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None


class Kernels(Library):
    """A library of GPU kernels for one encoding."""

    devices = ("cuda",)
    encoding: str

    def refuses(self, case, kind):
        return None if case.workload.encoding == self.encoding else f"has kernels for {self.encoding} only"


class XTransformers(Library):
    """x-transformers' bias modules, with PyTorch's attention as its own `flash=True` does."""

    name = "x-transformers"

    def refuses(self, case, kind):
        # its T5 module has no causal buckets of our sizes past the query, and its slopes are constants
        known = case.workload.encoding == "t5" or (case.workload.encoding == "alibi" and not case.workload.options)
        return None if known else "x-transformers has no such encoding"

    def kept(self, attention):
        return sum(buffer.nbytes for buffer in attention.module.buffers())  # ALiBi's [H, L, L], made once

    def make(self, problem):
        from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

        case, encoding = problem.case, problem.encoding
        if case.workload.encoding == "alibi":
            module = AlibiPositionalBias(heads=case.heads, total_heads=case.heads).to(case.device)
        else:
            module = RelativePositionBias(scale=1.0, causal=case.workload.causal, heads=case.heads).to(case.device)
            module.relative_attention_bias.weight = encoding.table
        scale = scale_of(problem.plan())

        def attention(q, k, v):
            bias = module(q.shape[2], k.shape[2])[None].to(q.dtype)
            return scaled_dot_product_attention(q, k, v, attn_mask=_causal(bias, case), scale=scale)

        attention.module = module  # type: ignore[attr-defined]
        return attention


class Transformers(Library):
    """The attention of transformers' own T5, DeBERTa-v2 and XLNet."""

    name = "transformers"

    def refuses(self, case, kind):
        known = case.workload.name in ("t5", "t5-causal", "t5-decode", "deberta", "transformer_xl")
        return None if known else "transformers has no such attention"

    def make(self, problem):
        make = {"deberta": self._deberta, "transformer_xl": self._xlnet}.get(problem.case.workload.encoding, self._t5)
        return make(problem)

    def _t5(self, problem):
        from transformers import T5Config
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.t5.modeling_t5 import T5Attention

        case = problem.case
        config = T5Config(
            d_model=case.heads * case.size, num_heads=case.heads, d_kv=case.size, is_decoder=case.workload.causal
        )
        module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(case.device)
        module.relative_attention_bias.weight = problem.encoding.table

        def attention(q, k, v):
            bias = module.compute_bias(q.shape[2], k.shape[2], past_seen_tokens=k.shape[2] - q.shape[2])
            bias = _causal(bias, case)
            out, _ = sdpa_attention_forward(module, q, k, v, attention_mask=bias, scaling=1.0, is_causal=False)
            return out.transpose(1, 2)

        return attention

    def _deberta(self, problem):
        from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

        case, encoding = problem.case, problem.encoding
        module = DisentangledSelfAttention(deberta_config(problem)).to(case.device).eval()
        module.pos_key_proj, module.pos_query_proj = encoding.pos_key, encoding.pos_query
        scale = (case.size * 3) ** -0.5

        def attention(q, k, v):
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            scores = flat[0] @ flat[1].transpose(-1, -2) * scale
            scores = scores + module.disentangled_attention_bias(flat[0], flat[1], None, encoding.table, 3)
            return (scores.softmax(-1) @ flat[2]).unflatten(0, q.shape[:2])

        return attention

    def _xlnet(self, problem):
        from transformers import XLNetConfig
        from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

        from ..encodings.absolute import sinusoid

        case, encoding = problem.case, problem.encoding
        config = XLNetConfig(d_model=case.heads * case.size, n_head=case.heads, d_inner=64, dropout=0.0)
        module = XLNetRelativeAttention(config).to(case.device)
        module.r_w_bias, module.r_r_bias = encoding.content_bias, encoding.position_bias
        distances = torch.arange(case.length, -case.length, -1, device=case.device)
        waves = sinusoid(distances, case.heads * case.size, base=10000.0, layout="concatenated").to(case.dtype)

        def attention(q, k, v):
            table = encoding.position_proj(waves).view(-1, 1, case.heads, case.size)
            heads = [x.permute(2, 0, 1, 3) for x in (q, k, v)]
            return module.rel_attn_core(*heads, table.expand(-1, q.shape[0], -1, -1)).permute(1, 2, 0, 3)

        return attention


class FlashDeberta(Kernels):
    """flashDeBERTa's Triton kernels (bidirectional)."""

    name = "flashdeberta"
    encoding = "deberta"

    def make(self, problem):
        kernel = _kernels("flashdeberta", "ops.flash_attention").flash_attention_with_disentangled
        buckets, max_distance = _deberta_sizes(problem)

        def attention(q, k, v):
            plan = problem.plan()
            (lookup,) = plan.lookups
            tables = lookup.dot_query[None], lookup.dot_key[None]
            return kernel(q, k, v, None, *tables, False, scale_of(plan), buckets, max_distance)

        return attention


class DisentangledFlash(Kernels):
    """disentangled-flash's training layer; the projections of q, k, v are left out.

    Its own tiles for the H200 were found with another release of the compiler. Of 17 forward and 14 backward ones tried
    there with Triton 3.6 for heads of 64 these are the fastest (4 x 4096 tokens: a step takes 26.0 ms instead of 33.4).
    """

    name = "disentangled-flash"
    encoding = "deberta"
    tiles = {"training_forward": (64, 128, 4, 2), "backward_dq": (64, 32, 4, 2), "backward_dkv": (16, 32, 4, 1)}

    def make(self, problem):
        from disentangled_flash import TritonTrainingDisentangledSelfAttention

        case, encoding = problem.case, problem.encoding
        module = TritonTrainingDisentangledSelfAttention(
            deberta_config(problem), assume_unpadded=True, profile_registry=_tiles(self.tiles)
        )
        module = module.to(device=case.device, dtype=case.dtype).eval()
        module.pos_key_proj, module.pos_query_proj = encoding.pos_key, encoding.pos_query
        module._reshape_heads = lambda x, batch, length: x
        visible = torch.ones(case.batch, case.length, dtype=torch.bool, device=case.device)
        hidden = problem.v.new_empty(case.batch, case.length, 1)  # only its length and dtype are used

        def attention(q, k, v):
            module._project_qkv = lambda hidden: (q, k, v)
            out, _ = module(hidden, visible, rel_embeddings=encoding.table)
            return out.unflatten(-1, (case.heads, case.size)).transpose(1, 2)

        return attention


class TurboT5(Kernels):
    """turboT5's fused T5 kernel. It has tiles for two older cards; those of the larger one are used."""

    name = "turbot5"
    encoding = "t5"

    def make(self, problem):
        module = _kernels("turbot5", "ops.fused_bias_attention")
        # "can be overwritten at runtime to use your custom config"; the fallback is 32 x 32 tiles
        module.get_fwd_config = lambda *shape: (128, 64, 3, 4)
        module.get_bwd_config = lambda *shape: (64, 64, 1, 4)
        causal, encoding = problem.case.workload.causal, problem.encoding

        def attention(q, k, v):
            table = encoding.table.float().contiguous()  # its gradient is added up atomically in the table's dtype
            return module.flash_attention_with_fusing_bias(
                q, k, v, table, causal, scale_of(problem.plan()), encoding.buckets, encoding.max_distance
            )

        return attention


def _causal(bias, case):
    if not case.workload.causal or bias.shape[-2] == 1:
        return bias
    future = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
    return bias.masked_fill(future, float("-inf"))


def deberta_config(problem):
    from transformers import DebertaV2Config

    buckets, max_distance = _deberta_sizes(problem)
    return DebertaV2Config(
        hidden_size=problem.case.heads * problem.case.size, num_attention_heads=problem.case.heads,
        relative_attention=True, pos_att_type=["c2p", "p2c"], share_att_key=False, position_buckets=buckets,
        max_relative_positions=max_distance,
    )  # fmt: skip


def _deberta_sizes(problem) -> tuple[int, int]:
    return problem.encoding.table.shape[0] // 2, problem.case.workload.options["max_distance"]


def _tiles(known: Mapping[str, tuple[int, ...]]):
    """disentangled-flash's own tiles; for the same card with another compiler, the known ones for heads of 64."""
    from disentangled_flash.tuning import KernelConfig, ProfileRegistry, load_bundled_profiles

    class Tiles(ProfileRegistry):
        def resolve(self, hardware, compiler, workload):
            exact = super().resolve(hardware, compiler, workload)
            own = [profile for profile in self.profiles if profile.hardware.matches(hardware)]
            if exact is not None or not own:
                return exact
            if workload.phase in known and workload.head_dim == 64 and workload.dtype == "half":
                return KernelConfig(*known[workload.phase])
            entries = (entry.config for profile in own for entry in profile.entries if entry.workload == workload)
            return next(entries, None)

    return Tiles(load_bundled_profiles())


def _kernels(package: str, module: str) -> Any:
    """A package's kernels without its model classes, which import names of older transformers."""
    if package not in sys.modules:
        found = importlib.util.find_spec(package)
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError(f"{package} is not a package")
        bare = types.ModuleType(package)
        bare.__path__ = list(found.submodule_search_locations)
        sys.modules[package] = bare
    return importlib.import_module(f"{package}.{module}")
