"""Models of published widths with random weights, and the inputs of a call: what `accelerated` measures."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

Inputs = dict[str, Any]
Made = tuple[Any, Inputs]


def make(model: str, config: str, inputs: Inputs, module: str = "", /, **options: Any) -> Made:
    """The class `model` with its configuration, by name; module: of a model that transformers does not export."""
    transformers = import_module("transformers")
    owner = transformers if not module else import_module(f"transformers.models.{module}.modeling_{module}")
    return getattr(owner, model)(getattr(transformers, config)(**options)), inputs


# ---- inputs --------------------------------------------------------------------------------------------------------
def pixels(rows: int, side: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, side, side)}


def waveform(seconds: int) -> Inputs:
    return {"input_values": torch.randn(1, 16000 * seconds)}


def states(rows: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(rows, length, width)


def tokens(rows: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(3, 1000, (rows, length))}


def padded(rows: int, length: int) -> Inputs:
    """The last row is half as long."""
    given = tokens(rows, length)
    mask = torch.ones_like(given["input_ids"])
    mask[-1, length // 2 :] = 0
    return {**given, "attention_mask": mask}


def decoded(rows: int, length: int) -> Inputs:
    """For a decoder, which would keep its keys and values."""
    return {**padded(rows, length), "use_cache": False}


def unpadded(made: Made) -> Made:
    return made[0], {"input_ids": made[1]["input_ids"]}


# ---- images --------------------------------------------------------------------------------------------------------
def swin(side: int, window: int, rows: int) -> Made:
    sizes = {"image_size": side, "window_size": window, "depths": [2, 2, 2, 2]}
    return make("SwinModel", "SwinConfig", pixels(rows, side), **sizes, drop_path_rate=0.0)


def beit(side: int) -> Made:
    options = {"num_hidden_layers": 3, "use_relative_position_bias": True, "drop_path_rate": 0.0}
    return make("BeitModel", "BeitConfig", pixels(1, side), image_size=side, **options)


def sam(side: int) -> Made:
    sizes = {"image_size": side, "num_hidden_layers": 2, "global_attn_indexes": [1]}
    return make("SamVisionEncoder", "SamVisionConfig", pixels(1, side), "sam", **sizes, attn_implementation="sdpa")  # fmt: skip


def timm(name: str, rows: int, side: int, **options: Any) -> Made:
    return import_module("timm.models").create_model(name, **options), {"x": torch.randn(rows, 3, side, side)}


# ---- speech --------------------------------------------------------------------------------------------------------
def speecht5(rows: int, frames: int) -> Made:
    inputs = {"input_values": states(rows, frames, 768)}
    return make("SpeechT5EncoderWithoutPrenet", "SpeechT5Config", inputs, "speecht5", encoder_layers=3, encoder_layerdrop=0.0)  # fmt: skip


def vits(rows: int, length: int) -> Made:
    ids, mask = torch.randint(1, 38, (rows, length)), torch.ones(rows, length)
    inputs = {"input_ids": ids, "padding_mask": mask[..., None], "attention_mask": mask}
    options = {"num_hidden_layers": 3, "layerdrop": 0.0, "attn_implementation": "eager"}
    return make("VitsTextEncoder", "VitsConfig", inputs, "vits", **options)


def fastspeech2(frames: int) -> Made:
    from transformers import FastSpeech2ConformerConfig
    from transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer import FastSpeech2ConformerEncoder

    config = FastSpeech2ConformerConfig(decoder_layers=2)
    return FastSpeech2ConformerEncoder(config, config.decoder_config), {"input_tensor": states(1, frames, 384)}


def parakeet(seconds: int) -> Made:
    model, _ = make("ParakeetEncoder", "ParakeetEncoderConfig", {}, num_hidden_layers=2, layerdrop=0.0)
    return model, {"input_features": states(1, 100 * seconds, model.config.num_mel_bins)}


def conformer(seconds: int, kind: str) -> Made:
    return make(
        "Wav2Vec2BertModel", "Wav2Vec2BertConfig", {"input_features": states(1, 50 * seconds, 160)}, num_hidden_layers=2, layerdrop=0.0,
        apply_spec_augment=False, add_adapter=False, position_embeddings_type=kind,
    )  # fmt: skip


def seamless(seconds: int, version: str, **options: Any) -> Made:
    """version: "" or "v2"."""
    module = f"seamless_m4t_{version}".rstrip("_")
    model, inputs = make(
        f"SeamlessM4T{version}ConformerEncoder", f"SeamlessM4T{version}Config", {"hidden_states": states(1, 50 * seconds, 1024)}, module,
        speech_encoder_layers=2, speech_encoder_layerdrop=0.0, **options,
    )  # fmt: skip
    model.config._attn_implementation = "sdpa"
    return model, inputs


# ---- text ----------------------------------------------------------------------------------------------------------
def t5(rows: int, length: int, layers: int = 2) -> Made:
    sizes = {"vocab_size": 1000, "d_model": 768, "d_ff": 3072, "num_heads": 12, "d_kv": 64}
    return make("T5EncoderModel", "T5Config", padded(rows, length), **sizes, num_layers=layers)


def longt5(rows: int, length: int, layers: int = 2, kind: str = "local") -> Made:
    sizes = {"vocab_size": 1000, "d_model": 768, "d_ff": 2048, "num_layers": layers, "num_heads": 12, "d_kv": 64}
    options = {"encoder_attention_type": kind, "feed_forward_proj": "gated-gelu"}
    return make("LongT5EncoderModel", "LongT5Config", padded(rows, length), **sizes, **options)


def deberta(rows: int, length: int, layers: int = 2) -> Made:
    return make(
        "DebertaV2Model", "DebertaV2Config", padded(rows, length), vocab_size=1000, num_hidden_layers=layers, hidden_size=768,
        num_attention_heads=12, intermediate_size=3072, relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip


def xlnet(rows: int, length: int) -> Made:
    sizes = {"vocab_size": 1000, "d_model": 768, "n_layer": 2, "n_head": 12, "d_inner": 3072}
    return make("XLNetModel", "XLNetConfig", padded(rows, length), **sizes)


def bloom(rows: int, length: int, layers: int = 2) -> Made:
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "n_layer": layers, "n_head": 16}
    return make("BloomModel", "BloomConfig", decoded(rows, length), **sizes)


def llama(rows: int, length: int) -> Made:
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2}
    return make("LlamaModel", "LlamaConfig", decoded(rows, length), **sizes, num_attention_heads=16, num_key_value_heads=4)  # fmt: skip


def falcon(length: int) -> Made:
    sizes = {"vocab_size": 1000, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 1}
    options = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    return make("FalconModel", "FalconConfig", {**tokens(1, length), "use_cache": False}, **sizes, **options)


def gpt_oss(length: int) -> Made:
    return make(
        "GptOssModel", "GptOssConfig", tokens(1, length), vocab_size=1000, hidden_size=1024, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_local_experts=2, num_experts_per_tok=1, sliding_window=128,
    )  # fmt: skip


def layoutlmv3(words: int) -> Made:
    boxes = torch.randint(0, 500, (1, words, 4)) + torch.tensor([0, 0, 500, 500])
    inputs = {**tokens(1, words), "bbox": boxes, **pixels(1, 224)}
    return make("LayoutLMv3Model", "LayoutLMv3Config", inputs, num_hidden_layers=3, max_position_embeddings=514)


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
    "UMT5-B's encoder, 2 × 512": lambda: make(
        "UMT5EncoderModel", "UMT5Config", padded(2, 512), vocab_size=1000, d_model=768, d_ff=2048, num_layers=2, num_heads=12, d_kv=64,
    ),
    "LongT5-B's encoder, 2048": lambda: longt5(1, 2048),
    "DeBERTa-v3-B, 2 × 128": lambda: deberta(2, 128),
    "DeBERTa-v3-B, 2 × 512": lambda: deberta(2, 512),
    "MPNet-B, 4 × 128": lambda: make("MPNetModel", "MPNetConfig", padded(4, 128), vocab_size=1000, num_hidden_layers=2),
    "MPNet-B, 2 × 512": lambda: make("MPNetModel", "MPNetConfig", padded(2, 510), vocab_size=1000, num_hidden_layers=2),
    "XLNet-B, 2 × 128": lambda: xlnet(2, 128),
    "XLNet-B, 2 × 512": lambda: xlnet(2, 512),
    "XLNet-B, 1024": lambda: xlnet(1, 1024),
    "BLOOM-560m, 2 × 512": lambda: bloom(2, 512),
    "BLOOM-560m, 2048": lambda: bloom(1, 2048),
    "MPT (width 1024), 2 × 512": lambda: make(
        "MptModel", "MptConfig", decoded(2, 512), vocab_size=1000, d_model=1024, n_heads=16, n_layers=2, max_seq_len=512,
    ),
    "GPT-J (width 1024), 2 × 512": lambda: make(
        "GPTJModel", "GPTJConfig", decoded(2, 512), vocab_size=1000, n_embd=1024, n_layer=2, n_head=4, n_positions=512, rotary_dim=64,
    ),
    "Llama (width 1024), 2 × 512": lambda: llama(2, 512),
    "BERT-B, 2 × 512": lambda: make("BertModel", "BertConfig", padded(2, 512), vocab_size=1000, num_hidden_layers=2),
    "ViT-B, 2 × 224²": lambda: make("ViTModel", "ViTConfig", pixels(2, 224), num_hidden_layers=2),
    "CPM-Ant (width 1024), 2 × 512": lambda: make(
        "CpmAntModel", "CpmAntConfig", tokens(2, 512), vocab_size=1000, hidden_size=1024, num_attention_heads=16, dim_head=64, dim_ff=2816,
        num_hidden_layers=2,
    ),
    "Inkling (width 1024), 1024": lambda: inkling(1, 1024),
    "Wav2Vec2-Conformer, rotary, 10 s": lambda: make(
        "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", waveform(10), num_hidden_layers=2, layerdrop=0.0, apply_spec_augment=False,
        position_embeddings_type="rotary",
    ),
    "w2v-BERT, 10 s": lambda: conformer(10, "relative_key"),
    "w2v-BERT with Transformer-XL's terms, 20 s": lambda: conformer(20, "relative"),
    "SeamlessM4T's speech encoder, 20 s": lambda: seamless(20, ""),
    "SeamlessM4T v2's speech encoder, 20 s": lambda: seamless(20, "v2", speech_encoder_chunk_size=20000),
    "Swin-T, 2 × 224²": lambda: swin(224, 7, 2),
    "Swin, windows of 12², 384²": lambda: swin(384, 12, 1),
    "Swin v2-T, 2 × 256²": lambda: make(
        "Swinv2Model", "Swinv2Config", pixels(2, 256), image_size=256, window_size=8, depths=[2, 2, 2, 2], drop_path_rate=0.0,
    ),
    "Donut's Swin, 640²": lambda: make(
        "DonutSwinModel", "DonutSwinConfig", pixels(1, 640), image_size=640, window_size=10, embed_dim=128, depths=[2, 2], num_heads=[4, 8],
        drop_path_rate=0.0,
    ),
    "BEiT-B, 224²": lambda: beit(224),
    "BEiT-B, 512²": lambda: beit(512),
    "SAM-B, 512²": lambda: sam(512),
    "SAM-B, 1024²": lambda: sam(1024),
    "ViTDet-B, 640²": lambda: make(
        "VitDetModel", "VitDetConfig", pixels(1, 640), image_size=640, pretrain_image_size=640, num_hidden_layers=2, window_block_indices=[0],
        window_size=14, use_relative_position_embeddings=True,
    ),
    "WavLM-B, 10 s": lambda: make("WavLMModel", "WavLMConfig", waveform(10), num_hidden_layers=3, layerdrop=0.0),
    "WavLM-B, 30 s": lambda: make("WavLMModel", "WavLMConfig", waveform(30), num_hidden_layers=3, layerdrop=0.0),
    "SpeechT5's encoder, 5 s": lambda: speecht5(1, 250),
    "SpeechT5's encoder, 4 × 5 s": lambda: speecht5(4, 250),
    "SpeechT5's encoder, 20 s": lambda: speecht5(1, 1000),
    "VITS's text encoder, 150 tokens": lambda: vits(1, 150),
    "VITS's text encoder, 4 × 300 tokens": lambda: vits(4, 300),
    "VITS's text encoder, 600 tokens": lambda: vits(1, 600),
    "SEW-D, 10 s": lambda: make("SEWDModel", "SEWDConfig", waveform(10), num_hidden_layers=3),
    "SEW-D, 30 s": lambda: make("SEWDModel", "SEWDConfig", waveform(30), num_hidden_layers=3),
    "Falcon with ALiBi, 512 tokens": lambda: falcon(512),
    "Falcon with ALiBi, 2048 tokens": lambda: falcon(2048),
    "LayoutLMv3-B, 128 words": lambda: layoutlmv3(128),
    "LayoutLMv3-B, 512 words": lambda: layoutlmv3(512),
    "FastSpeech2-Conformer's decoder, 600 frames": lambda: fastspeech2(600),
    "Parakeet, 20 s": lambda: parakeet(20),
    "Parakeet, 60 s": lambda: parakeet(60),
    "gpt-oss (narrow), 512 tokens": lambda: gpt_oss(512),
    "gpt-oss (narrow), 2048 tokens": lambda: gpt_oss(2048),
    "timm's Swin-T, 2 × 224²": lambda: timm("swin_tiny_patch4_window7_224", 2, 224),
    "timm's Swin v2-T, 2 × 256²": lambda: timm("swinv2_tiny_window8_256", 2, 256),
    "timm's Swin v2 CR-T, 2 × 224²": lambda: timm("swinv2_cr_tiny_224", 2, 224),
    "timm's BEiT-B, 224²": lambda: timm("beit_base_patch16_224", 1, 224),
    "timm's ViT-S with relative positions, 2 × 224²": lambda: timm("vit_relpos_small_patch16_224", 2, 224),
    "timm's MaxViT-T, 224²": lambda: timm("maxvit_tiny_tf_224", 1, 224),
    "timm's CoAtNet-0, 224²": lambda: timm("coatnet_0_rw_224", 1, 224),
    "timm's GCViT-T, 224²": lambda: timm("gcvit_tiny", 1, 224),
    "timm's SAM-B, 512²": lambda: timm("samvit_base_patch16", 1, 512, img_size=512),
}  # fmt: skip
