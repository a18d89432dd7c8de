"""Vision, speech and sink models on a CPU, as they are and accelerated: forward pass and training step, time and memory.

    python -m posenc.hf.measure_families --out bench/results/hf-families.json --missing       after an interruption: the rest
    python -m posenc.hf.measure_families --table bench/results/hf-families.json        as the documentation has it

Published widths, few layers, random weights, float32, one thread unless --threads is given. Times are processor time of this
process, minima of calls that alternate between the two models; memory is the peak above the loaded model, each model in a process of its own.
How busy the machine was (its load, and how long the model took) stands beside the figures: most models took one to three
minutes on two busy cores, SAM at 1024² four.
Outputs are compared before anything is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import posenc

from ..core import files
from .family import first
from .measure import _compare, _peak, _reset_peak, _resident

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


MODELS: dict[str, Callable[[], Made]] = {
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
WAYS = ("original", "accelerated")


def load(name: str, way: str) -> Made:
    from .. import hf

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    tables = [
        p
        for key, p in model.named_parameters()
        if "bias_table" in key or "rel_pos" in key or key.endswith("sinks") or "pos_bias" in key
    ]
    for table in tables:
        torch.nn.init.normal_(table, std=0.02)
    return (hf.accelerate(model) if way == "accelerated" else model).eval(), inputs


def forward(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return first(model(**inputs))


def step(model: Any, inputs: dict[str, Any]) -> None:
    model.zero_grad()
    first(model(**inputs)).square().mean().backward()


def memory(name: str, way: str, what: str) -> int:
    """Bytes above the loaded model, at the peak of a call; in this process."""
    model, inputs = load(name, way)
    before = _resident()
    _reset_peak()
    (forward if what == "forward" else step)(model, inputs)
    return _peak() - before


def in_child(name: str, way: str, what: str, threads: int) -> int:
    command = [
        sys.executable,
        "-m",
        "posenc.hf.measure_families",
        "--memory",
        name,
        way,
        what,
        "--threads",
        str(threads),
    ]
    done = subprocess.run(
        command, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}, {way}: {done.stderr[-1000:]}")
    return int(done.stdout.split()[-1])


def measure(name: str, times: int, threads: int) -> dict[str, Any]:
    started, busy = time.perf_counter(), os.getloadavg()[0]
    models = {way: load(name, way) for way in WAYS}
    inputs = models["original"][1]
    result: dict[str, Any] = {
        "error": _compare(name, forward(models["accelerated"][0], inputs), forward(models["original"][0], inputs))
    }
    for what, call in (("forward", forward), ("step", step)):
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(times + 1):
            for way in WAYS:
                start = time.process_time()
                call(models[way][0], inputs)
                if number:
                    taken[way].append(time.process_time() - start)
        for way in WAYS:
            cell = {"seconds": min(taken[way]), "extra_bytes": in_child(name, way, what, threads)}
            result.setdefault(way, {})[what] = cell
    result["load"] = round(max(busy, os.getloadavg()[0]), 1)
    result["seconds"] = round(time.perf_counter() - started)
    return result


def table(result: dict[str, Any], heads: tuple[str, ...] = ("model", "forward", "training step")) -> str:
    """Rows of Markdown: before → after, seconds and MiB, and the ratios."""
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, one in result["models"].items():
        cells = []
        for what in ("forward", "step"):
            old, new = one["original"][what], one["accelerated"][what]
            pair = [f"{1000 * cell['seconds']:.0f} ms, {cell['extra_bytes'] / 2**20:.0f} MiB" for cell in (old, new)]
            ratio = f"{old['seconds'] / new['seconds']:.2f} ×, {old['extra_bytes'] / max(new['extra_bytes'], 1):.1f} ×"
            cells.append(f"{pair[0]} → {pair[1]} ({ratio})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m posenc.hf.measure_families", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON; models that it has are kept")
    parser.add_argument("--missing", action="store_true", help="leave out the models that --out has")
    parser.add_argument("--table", type=Path, help="print the table of this result instead")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    if given.memory:
        print(memory(*given.memory))
        return
    if given.table:
        print(table(json.loads(given.table.read_text(encoding="utf-8"))))
        return
    import transformers

    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {given.threads} threads", "models": {},
        "versions": {"posenc": posenc.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }  # fmt: skip
    if given.out and given.out.is_file():
        result["models"] = json.loads(given.out.read_text(encoding="utf-8"))["models"]
    for name in [one for one in given.models if not given.missing or one not in result["models"]]:
        result["models"][name] = measure(name, given.times, given.threads)
        print(table({"models": {name: result["models"][name]}}).splitlines()[-1], flush=True)
        if given.out:
            files.write_json(given.out, result)


if __name__ == "__main__":
    main()
