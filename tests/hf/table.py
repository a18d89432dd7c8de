"""docs/hf-families.md: the families of the harness, their way, what is checked, time and memory.

python -m tests.hf.table > docs/hf-families.md
"""

import copy
import json
import time
from pathlib import Path

import torch
import transformers

from posenc import hf
from posenc.hf import measure_families
from tests.hf.cases import EVERY
from tests.hf.harness import checks_of, inputs_of, outcome, real_output

HEAD = """# Families of posenc.hf

Made by `python -m tests.hf.table` from the cases of the harness (tests/hf/families), which compares every model with the
original: outputs to 1e-5, gradients to 1e-4. The last rows stand for every model that calls transformers' attention interface.

way       *interface*: attn_implementation="posenc", and the methods of an instance that would build a dense bias are replaced.
          *override*: the layer calls no interface, so its class is replaced by a subclass
times     of the tiny models of the harness on longer texts (where their positions allow), one CPU core, float32:
          milliseconds of processor time, the original first, the least of {times} alternating runs
saved     what a training step keeps for the backward pass, KiB, the original first
"""
TIMES = 5
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "hf-families.json"
MEASURED = """## Published widths

Few layers, random weights, one thread{busy} (`python -m posenc.hf.measure_families`): the original, then accelerated, and how many
times faster and smaller.
"""


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


def alternate(*runs):
    """The least processor time of each, ms."""
    best = [float("inf")] * len(runs)
    for number in range(TIMES + 1):
        for one, run in enumerate(runs):
            start = time.process_time()
            run()
            if number:
                best[one] = min(best[one], 1e3 * (time.process_time() - start))
    return best


def forward(model, inputs):
    with torch.no_grad():
        real_output(model, inputs)


def row(name, case):
    model, inputs = case.make(), inputs_of(case, "mixed" if case.paddings != ("none",) else "none")
    try:
        forward(model, longer(inputs))
        inputs = longer(inputs)
    except Exception:  # a model with a longest text
        pass
    ours = hf.accelerate(copy.deepcopy(model))
    ways = list(dict.fromkeys(one.way for one in hf.report(ours, length=64).layers))
    a, b = alternate(lambda: forward(model, inputs), lambda: forward(ours, inputs))
    c, d = alternate(lambda: outcome(model, inputs), lambda: outcome(ours, inputs))
    before, after = (saved_bytes(one, inputs) / 1024 for one in (model, ours))
    length = next(iter(inputs.values())).shape[1:]
    return (
        f"| {name} | {'; '.join(ways)} | {', '.join(checks_of(case))} | {'×'.join(map(str, length))} "
        f"| {a:.1f} → {b:.1f} | {c:.1f} → {d:.1f} | {before:.0f} → {after:.0f} |"
    )


def measured():
    """The models of published widths, from the committed run."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    loads = [one["load"] for one in result["models"].values() if "load" in one]
    busy = f", on two cores with a load of up to {max(loads)} where it was recorded" if loads else ""
    return f"\n{MEASURED.format(busy=busy)}\n{measure_families.table(result)}"


def main():
    torch.set_num_threads(1)
    print(HEAD.format(times=TIMES))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; the harness also runs with the lowest supported\n"
          "transformers (make test-hf-lowest) and with the newest that pip finds (make test-hf-newest).\n")  # fmt: skip
    print("| model | way | checks | input | forward, ms | training step, ms | saved, KiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, case in EVERY.items():
        print(row(name, case), flush=True)
    print(measured())


if __name__ == "__main__":
    main()
