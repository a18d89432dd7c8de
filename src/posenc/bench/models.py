"""Models of published widths with random weights, and the inputs of a call: what `accelerated` measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Made = tuple[Any, dict[str, Any]]


def pixels(rows: int, side: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, side, side)}


def swin(side: int, window: int, rows: int) -> Made:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(image_size=side, window_size=window, depths=[2, 2, 2, 2], drop_path_rate=0.0)
    return SwinModel(config), pixels(rows, side)


def swinv2() -> Made:
    from transformers import Swinv2Config, Swinv2Model

    config = Swinv2Config(image_size=256, window_size=8, depths=[2, 2, 2, 2], drop_path_rate=0.0)
    return Swinv2Model(config), pixels(2, 256)


def donut() -> Made:
    from transformers import DonutSwinConfig, DonutSwinModel

    config = DonutSwinConfig(
        image_size=640, window_size=10, embed_dim=128, depths=[2, 2], num_heads=[4, 8], drop_path_rate=0.0
    )
    return DonutSwinModel(config), pixels(1, 640)


def beit(side: int) -> Made:
    from transformers import BeitConfig, BeitModel

    config = BeitConfig(image_size=side, num_hidden_layers=3, use_relative_position_bias=True, drop_path_rate=0.0)
    return BeitModel(config), pixels(1, side)


def sam(side: int) -> Made:
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    config = SamVisionConfig(image_size=side, num_hidden_layers=2, global_attn_indexes=[1])
    config._attn_implementation = "sdpa"
    return SamVisionEncoder(config), pixels(1, side)


def vitdet() -> Made:
    from transformers import VitDetConfig, VitDetModel

    config = VitDetConfig(
        image_size=640, pretrain_image_size=640, num_hidden_layers=2, window_block_indices=[0], window_size=14,
        use_relative_position_embeddings=True,
    )  # fmt: skip
    return VitDetModel(config), pixels(1, 640)


def wavlm(seconds: int) -> Made:
    from transformers import WavLMConfig, WavLMModel

    return WavLMModel(WavLMConfig(num_hidden_layers=3, layerdrop=0.0)), {
        "input_values": torch.randn(1, 16000 * seconds)
    }


def gpt_oss(length: int) -> Made:
    from transformers import GptOssConfig, GptOssModel

    config = GptOssConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=512, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, num_local_experts=2, num_experts_per_tok=1, sliding_window=128,
    )  # fmt: skip
    return GptOssModel(config), {"input_ids": torch.randint(3, 1000, (1, length))}


def states(rows: int, length: int, width: int) -> Any:
    return torch.randn(rows, length, width)


def speecht5(rows: int, frames: int) -> Made:
    from transformers import SpeechT5Config
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5EncoderWithoutPrenet

    config = SpeechT5Config(encoder_layers=3, encoder_layerdrop=0.0)
    return SpeechT5EncoderWithoutPrenet(config), {"input_values": states(rows, frames, 768)}


def vits(rows: int, tokens: int) -> Made:
    from transformers import VitsConfig
    from transformers.models.vits.modeling_vits import VitsTextEncoder

    encoder = VitsTextEncoder(VitsConfig(num_hidden_layers=3, layerdrop=0.0, attn_implementation="eager"))
    ids, mask = torch.randint(1, 38, (rows, tokens)), torch.ones(rows, tokens)
    return encoder, {"input_ids": ids, "padding_mask": mask[..., None], "attention_mask": mask}


def sew_d(seconds: int) -> Made:
    from transformers import SEWDConfig, SEWDModel

    return SEWDModel(SEWDConfig(num_hidden_layers=3)), {"input_values": torch.randn(1, 16000 * seconds)}


def falcon(length: int) -> Made:
    from transformers import FalconConfig, FalconModel

    config = FalconConfig(
        vocab_size=1000, hidden_size=2048, num_attention_heads=32, num_hidden_layers=1, alibi=True, multi_query=False,
        parallel_attn=False, bias=True,
    )  # fmt: skip
    return FalconModel(config), {"input_ids": torch.randint(3, 1000, (1, length)), "use_cache": False}


def layoutlmv3(words: int) -> Made:
    from transformers import LayoutLMv3Config, LayoutLMv3Model

    boxes = torch.randint(0, 500, (1, words, 4)) + torch.tensor([0, 0, 500, 500])
    return LayoutLMv3Model(LayoutLMv3Config(num_hidden_layers=3, max_position_embeddings=514)), {
        "input_ids": torch.randint(3, 1000, (1, words)), "bbox": boxes, **pixels(1, 224)
    }  # fmt: skip


def fastspeech2(frames: int) -> Made:
    from transformers import FastSpeech2ConformerConfig
    from transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer import FastSpeech2ConformerEncoder

    config = FastSpeech2ConformerConfig(decoder_layers=2)
    return FastSpeech2ConformerEncoder(config, config.decoder_config), {"input_tensor": states(1, frames, 384)}


def parakeet(seconds: int) -> Made:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    config = ParakeetEncoderConfig(num_hidden_layers=2, layerdrop=0.0)
    return ParakeetEncoder(config), {"input_features": states(1, 100 * seconds, config.num_mel_bins)}


def tokens(rows: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 1000, (rows, length))}


def padded(rows: int, length: int) -> dict[str, Any]:
    """The last row is half as long."""
    given = tokens(rows, length)
    mask = torch.ones_like(given["input_ids"])
    mask[-1, length // 2 :] = 0
    return {**given, "attention_mask": mask}


def t5(rows: int, length: int, layers: int = 2) -> Made:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=1000, d_model=768, d_ff=3072, num_layers=layers, num_heads=12, d_kv=64)
    return T5EncoderModel(config), padded(rows, length)


def umt5(rows: int, length: int) -> Made:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=1000, d_model=768, d_ff=2048, num_layers=2, num_heads=12, d_kv=64)
    return UMT5EncoderModel(config), padded(rows, length)


def longt5(rows: int, length: int, layers: int = 2, kind: str = "local") -> Made:
    from transformers import LongT5Config, LongT5EncoderModel

    config = LongT5Config(
        vocab_size=1000, d_model=768, d_ff=2048, num_layers=layers, num_heads=12, d_kv=64, encoder_attention_type=kind,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return LongT5EncoderModel(config), padded(rows, length)


def deberta(rows: int, length: int, layers: int = 2) -> Made:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=1000, num_hidden_layers=layers, hidden_size=768, num_attention_heads=12, intermediate_size=3072,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip
    return DebertaV2Model(config), padded(rows, length)


def mpnet(rows: int, length: int) -> Made:
    from transformers import MPNetConfig, MPNetModel

    return MPNetModel(MPNetConfig(vocab_size=1000, num_hidden_layers=2)), padded(rows, length)


def xlnet(rows: int, length: int) -> Made:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=1000, d_model=768, n_layer=2, n_head=12, d_inner=3072)
    return XLNetModel(config), padded(rows, length)


def bloom(rows: int, length: int, layers: int = 2) -> Made:
    from transformers import BloomConfig, BloomModel

    config = BloomConfig(vocab_size=1000, hidden_size=1024, n_layer=layers, n_head=16)
    return BloomModel(config), {**padded(rows, length), "use_cache": False}


def mpt(rows: int, length: int) -> Made:
    from transformers import MptConfig, MptModel

    config = MptConfig(vocab_size=1000, d_model=1024, n_heads=16, n_layers=2, max_seq_len=length)
    return MptModel(config), {**padded(rows, length), "use_cache": False}


def gptj(rows: int, length: int) -> Made:
    from transformers import GPTJConfig, GPTJModel

    config = GPTJConfig(vocab_size=1000, n_embd=1024, n_layer=2, n_head=4, n_positions=length, rotary_dim=64)
    return GPTJModel(config), {**padded(rows, length), "use_cache": False}


def llama(rows: int, length: int) -> Made:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    return LlamaModel(config), {**padded(rows, length), "use_cache": False}


def cpmant(rows: int, length: int) -> Made:
    from transformers import CpmAntConfig, CpmAntModel

    config = CpmAntConfig(
        vocab_size=1000, hidden_size=1024, num_attention_heads=16, dim_head=64, dim_ff=2816, num_hidden_layers=2
    )
    return CpmAntModel(config), tokens(rows, length)


def bert(rows: int, length: int) -> Made:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=1000, num_hidden_layers=2)), padded(rows, length)


def vit() -> Made:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(num_hidden_layers=2)), pixels(2, 224)


def rotary_speech(seconds: int) -> Made:
    from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

    config = Wav2Vec2ConformerConfig(
        num_hidden_layers=2, layerdrop=0.0, apply_spec_augment=False, position_embeddings_type="rotary"
    )
    return Wav2Vec2ConformerModel(config), {"input_values": torch.randn(1, 16000 * seconds)}


def conformer(seconds: int, kind: str) -> Made:
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    config = Wav2Vec2BertConfig(
        num_hidden_layers=2, layerdrop=0.0, apply_spec_augment=False, add_adapter=False, position_embeddings_type=kind
    )
    return Wav2Vec2BertModel(config), {"input_features": states(1, 50 * seconds, 160)}


def seamless(seconds: int, version: int) -> Made:
    from transformers import SeamlessM4TConfig, SeamlessM4Tv2Config
    from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TConformerEncoder
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import SeamlessM4Tv2ConformerEncoder

    options: Any = dict(speech_encoder_layers=2, speech_encoder_layerdrop=0.0)
    if version == 1:
        encoder: Any = SeamlessM4TConformerEncoder(SeamlessM4TConfig(**options))
    else:
        encoder = SeamlessM4Tv2ConformerEncoder(SeamlessM4Tv2Config(**options, speech_encoder_chunk_size=20000))
    encoder.config._attn_implementation = "sdpa"
    return encoder, {"hidden_states": states(1, 50 * seconds, 1024)}


def inkling(rows: int, length: int) -> Made:
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingTextModel

    heads: Any = dict(num_attention_heads=16, num_key_value_heads=4, head_dim=64)
    config = InklingTextConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, local_layer_ids=[1],
        mlp_layer_types=["dense", "dense"], rel_extent=512, sliding_window_size=256, pad_token_id=0, eos_token_id=1,
        bos_token_id=2, **heads, **{f"swa_{name}": value for name, value in heads.items()},
    )  # fmt: skip
    return InklingTextModel(config), {**tokens(rows, length), "use_cache": False}


def unpadded(made: Made) -> Made:
    return made[0], {"input_ids": made[1]["input_ids"]}


WHOLE: dict[str, Callable[[], Made]] = {
    "T5-base, 2048": lambda: unpadded(t5(1, 2048, 12)),
    "DeBERTa-v3-base, 2048": lambda: unpadded(deberta(1, 2048, 12)),
    "LongT5-base, 4096": lambda: unpadded(longt5(1, 4096, 12, "transient-global")),
    "T5-base, 4 × 4096": lambda: unpadded(t5(4, 4096, 12)),
    "DeBERTa-v3-base, 4 × 4096": lambda: unpadded(deberta(4, 4096, 12)),
    "LongT5-base, 4 × 4096": lambda: unpadded(longt5(4, 4096, 12, "transient-global")),
}
"""Encoders with all twelve layers: sizes for a CPU, then for a GPU."""
MODELS: dict[str, Callable[[], Made]] = {
    "T5-B's encoder, 2 × 128": lambda: t5(2, 128),
    "T5-B's encoder, 2 × 512": lambda: t5(2, 512),
    "T5-B's encoder, 2048": lambda: t5(1, 2048),
    "UMT5-B's encoder, 2 × 512": lambda: umt5(2, 512),
    "LongT5-B's encoder, 2048": lambda: longt5(1, 2048),
    "DeBERTa-v3-B, 2 × 128": lambda: deberta(2, 128),
    "DeBERTa-v3-B, 2 × 512": lambda: deberta(2, 512),
    "MPNet-B, 4 × 128": lambda: mpnet(4, 128),
    "MPNet-B, 2 × 512": lambda: mpnet(2, 510),
    "XLNet-B, 2 × 128": lambda: xlnet(2, 128),
    "XLNet-B, 2 × 512": lambda: xlnet(2, 512),
    "XLNet-B, 1024": lambda: xlnet(1, 1024),
    "BLOOM-560m, 2 × 512": lambda: bloom(2, 512),
    "BLOOM-560m, 2048": lambda: bloom(1, 2048),
    "MPT (width 1024), 2 × 512": lambda: mpt(2, 512),
    "GPT-J (width 1024), 2 × 512": lambda: gptj(2, 512),
    "Llama (width 1024), 2 × 512": lambda: llama(2, 512),
    "BERT-B, 2 × 512": lambda: bert(2, 512),
    "ViT-B, 2 × 224²": vit,
    "CPM-Ant (width 1024), 2 × 512": lambda: cpmant(2, 512),
    "Inkling (width 1024), 1024": lambda: inkling(1, 1024),
    "Wav2Vec2-Conformer, rotary, 10 s": lambda: rotary_speech(10),
    "w2v-BERT, 10 s": lambda: conformer(10, "relative_key"),
    "w2v-BERT with Transformer-XL's terms, 20 s": lambda: conformer(20, "relative"),
    "SeamlessM4T's speech encoder, 20 s": lambda: seamless(20, 1),
    "SeamlessM4T v2's speech encoder, 20 s": lambda: seamless(20, 2),
    "Swin-T, 2 × 224²": lambda: swin(224, 7, 2),
    "Swin, windows of 12², 384²": lambda: swin(384, 12, 1),
    "Swin v2-T, 2 × 256²": swinv2,
    "Donut's Swin, 640²": donut,
    "BEiT-B, 224²": lambda: beit(224),
    "BEiT-B, 512²": lambda: beit(512),
    "SAM-B, 512²": lambda: sam(512),
    "SAM-B, 1024²": lambda: sam(1024),
    "ViTDet-B, 640²": vitdet,
    "WavLM-B, 10 s": lambda: wavlm(10),
    "WavLM-B, 30 s": lambda: wavlm(30),
    "SpeechT5's encoder, 5 s": lambda: speecht5(1, 250),
    "SpeechT5's encoder, 4 × 5 s": lambda: speecht5(4, 250),
    "SpeechT5's encoder, 20 s": lambda: speecht5(1, 1000),
    "VITS's text encoder, 150 tokens": lambda: vits(1, 150),
    "VITS's text encoder, 4 × 300 tokens": lambda: vits(4, 300),
    "VITS's text encoder, 600 tokens": lambda: vits(1, 600),
    "SEW-D, 10 s": lambda: sew_d(10),
    "SEW-D, 30 s": lambda: sew_d(30),
    "Falcon with ALiBi, 512 tokens": lambda: falcon(512),
    "Falcon with ALiBi, 2048 tokens": lambda: falcon(2048),
    "LayoutLMv3-B, 128 words": lambda: layoutlmv3(128),
    "LayoutLMv3-B, 512 words": lambda: layoutlmv3(512),
    "FastSpeech2-Conformer's decoder, 600 frames": lambda: fastspeech2(600),
    "Parakeet, 20 s": lambda: parakeet(20),
    "Parakeet, 60 s": lambda: parakeet(60),
    "gpt-oss (narrow), 512 tokens": lambda: gpt_oss(512),
    "gpt-oss (narrow), 2048 tokens": lambda: gpt_oss(2048),
}
