"""docs/hf-families.md: the families of the harness, their way, what is checked, time and memory.

python -m tests.hf.table > docs/hf-families.md
"""

import copy
import json
from pathlib import Path

import torch
import transformers

from posenc import hf
from posenc.bench import accelerated
from tests.hf.cases import EVERY
from tests.hf.harness import checks_of, inputs_of, real_output

HEAD = """# Families of posenc.hf

Made by `python -m tests.hf.table` from the cases of the harness (tests/hf/families), which compares every model with the
original: outputs to 1e-5, gradients to 1e-4. tests/hf/test_gpu.py does the same on a GPU. The rows from llama to vit stand for every
model that calls transformers' attention interface.

way       *interface*: attn_implementation="posenc", and the methods of an instance that would build a dense bias are replaced.
          *override*: the layer calls no interface, so its class is replaced by a subclass
saved     what a training step of the tiny model keeps for the backward pass, KiB, the original first
measured  the row of "Published widths" with its speed and memory
"""
ROOT = Path(__file__).parents[2] / "bench" / "results"
ON_CPUS = ROOT / "hf-families.json", ROOT / "hf-families-amd.json"
"""The rows of the second are marked."""
ON_GPU = ROOT / "hf-families-h200.json"
MARK = " †"
MEASURED = """## Published widths

Few layers, random weights (`python -m posenc.bench.accelerated`): the original → accelerated, and how many times faster and smaller. Ratios
between 0.97 and 1.03 are within the noise of either machine; where the original is faster, it is what runs (`posenc/hf/rules.py`).
CPU: float32, {cpu}; rows with †: {marked}. GPU: {gpu};
Wav2Vec2-Conformer by autocast, because it rotates in float32. timm's models by `posenc.timm`, 1.0.30 (docs/timm-survey.md).
"""
MODELS = {
    "bloom": "BLOOM", "mpt": "MPT", "beit": "BEiT", "data2vec": "BEiT", "speech rotary": "Wav2Vec2-Conformer,", "cpmant": "CPM-Ant", "gpt2": "Llama", "bert": "BERT", "bart": "BERT", "vit": "ViT-B", "speech conformer": "w2v-BERT with",
    "speech bert relative": "w2v-BERT with", "speech bert relative_key": "w2v-BERT, ", "speech seamless": "SeamlessM4T's",
    "speech seamless v2": "SeamlessM4T v2", "speech seamless v2 chunks": "SeamlessM4T v2", "deberta": "DeBERTa", "sam": "SAM", "sam_hq": "SAM",
    "got_ocr2": "SAM", "pp_formulanet": "SAM", "slanext": "SAM", "unlimited_ocr": "SAM", "deepseek_ocr2": "SAM", "seggpt": "ViTDet",
    "vitdet": "ViTDet", "falcon": "Falcon", "inkling": "Inkling", "layoutlm": "LayoutLM", "pp_doclayout_v2": "LayoutLM", "longt5": "LongT5",
    "mpnet": "MPNet", "llama": "Llama", "mistral": "Llama", "gemma": "Llama", "fastspeech2": "FastSpeech2", "parakeet": "Parakeet",
    "nemotron_asr_streaming": "Parakeet", "sew_d": "SEW-D", "speecht5": "SpeechT5", "vits": "VITS", "gpt_oss": "gpt-oss", "swinv2": "Swin v2",
    "swin2sr": "Swin v2", "swin": "Swin-T", "maskformer": "Swin-T", "clap": "Swin-T", "donut": "Donut", "t5": "T5-B", "mt5": "T5-B", "umt5": "UMT5",
    "switch": "T5-B", "pop2piano": "T5-B", "pix2struct": "T5-B", "udop": "T5-B", "wavlm": "WavLM", "xlnet": "XLNet", "gptj": "GPT-J",
    "codegen": "GPT-J",
}  # fmt: skip
"""The beginning of a case's name -> that of its row of published widths; the longest beginning counts."""


def longer(inputs):
    """Eight times a text of up to 64 tokens; images and longer texts stay."""
    if next(iter(inputs.values())).shape[1] > 64:
        return inputs
    return {name: x.repeat(1, 8, *(1,) * (x.dim() - 2)) if 1 < x.dim() < 4 else x for name, x in inputs.items()}


def saved_bytes(model, inputs):
    """Of the tensors that autograd keeps, each storage once; parameters are not counted."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        real_output(model, inputs)
    return sum(size for size, _ in kept.values())


def measured_as(name):
    found = max((one for one in MODELS if name.startswith(one)), key=len, default=None)
    return MODELS[found].strip(" ,").removesuffix("'s").removesuffix(" with") if found is not None else ""


def row(name, case):
    model, inputs = case.make(), inputs_of(case, "mixed" if "left" in case.paddings else case.paddings[-1])
    try:
        with torch.no_grad():
            real_output(model, longer(inputs))
        inputs = longer(inputs)
    except Exception:  # a model with a longest text
        pass
    ours = hf.accelerate(copy.deepcopy(model))
    ways = list(dict.fromkeys(one.way for one in hf.report(ours, length=64).layers))
    before, after = (saved_bytes(one, inputs) / 1024 for one in (model, ours))
    length = next(iter(inputs.values())).shape[1:]
    return (
        f"| {name} | {'; '.join(ways)} | {', '.join(checks_of(case))} | {'×'.join(map(str, length))} "
        f"| {before:.0f} → {after:.0f} | {measured_as(name)} |"
    )


def measured():
    """The models of published widths, from the committed runs."""
    on_cpu, marked, on_gpu = (json.loads(path.read_text(encoding="utf-8")) for path in (*ON_CPUS, ON_GPU))
    heads = ("model", "CPU, forward", "CPU, training step", "GPU, forward", "GPU, training step")
    texts = [
        f"{one['machine']}; transformers {one['versions']['transformers']}, torch {one['versions']['torch']}"
        for one in (on_cpu, marked, on_gpu)
    ]
    texts[2] = texts[2].replace(";", ", bfloat16, eight times as many rows;", 1)
    lines = [MEASURED.format(cpu=texts[0], marked=texts[1], gpu=texts[2])]
    lines += [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name in accelerated.MODELS:
        is_marked = name not in on_cpu["models"] and name in marked["models"]
        cells = [
            accelerated.cells(result["models"][name]) if name in result["models"] else ["", ""]
            for result in (marked if is_marked else on_cpu, on_gpu)
        ]
        if any(any(pair) for pair in cells):
            lines.append(f"| {name}{MARK if is_marked else ''} | {' | '.join((*cells[0], *cells[1]))} |")
    return "\n" + "\n".join(lines)


def main():
    torch.set_num_threads(1)
    print(HEAD)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; the harness also runs with the lowest supported\n"
          "transformers (make test-hf-lowest) and with the newest that pip finds (make test-hf-newest).\n")  # fmt: skip
    print("| model | way | checks | input | saved, KiB | measured |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, case in EVERY.items():
        print(row(name, case), flush=True)
    print(measured())


if __name__ == "__main__":
    main()
