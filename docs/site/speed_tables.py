"""Speed tables of the published runs: bench/results/README.md (the goals, growth, all contenders) and one table for the site."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from posenc.bench.growth import extra_bytes, growth
from posenc.bench.report import describe_machine, milliseconds, not_timed

from .markdown import table

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LENGTH = 4096
CHINESE = {
    "plan": "方案",
    "forward": "前向",
    "training step": "训练一步",
    "extra memory": "额外内存",
    "best peer, forward": "最好的同类，前向",
    "best peer, training": "最好的同类，训练",
    "legend": "时间是相对于不带位置的 {base} 的倍数，每个对照都与它轮流测量（B{batch} H{heads} D{size}，{length} 个词元，{dtype}，{machine}；"
    "{versions}）。额外内存：超出同一基准的部分，括号内为占稠密 float32 [H, L, L] 偏置的比例。所有结果都先与 float64 参考值核对。",
}


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def markdown(result: dict, length: int, labels: dict[str, str] | None = None) -> str:
    """One table at one length. `labels` translates headings and the legend."""
    translate = (labels or {}).get
    records = [r for r in result["records"] if r["length"] == length]
    base = result["ceilings"][0]
    headings = ["plan", "forward", "training step", "extra memory", "best peer, forward", "best peer, training"]
    rows = []
    for name in dict.fromkeys(r["workload"] for r in records):
        own = {r["pass"]: r for r in records if r["workload"] == name and r["peer"] == "posenc" and "ratio" in r}
        if not own:
            continue
        extra = max((extra_bytes(r, records, base) or 0 for r in own.values() if "bytes" in r), default=0)
        some = next(iter(own.values()))
        cells = [name, *(f"{own[kind]['ratio']:.2f} ×" if kind in own else "–" for kind in ("forward", "training"))]
        cells.append(f"{max(0, extra) / 2**20:.0f} MiB ({max(0, extra) / (some['heads'] * 4 * length**2):.1%})")
        cells += [_best(records, name, kind, result["ceilings"]) for kind in ("forward", "training")]
        rows.append(cells)
    versions = ", ".join(
        f"{name} {version}"
        for name, version in result["versions"].items()
        if version and name not in (*result["ceilings"], "dense bias", "textbook", "flex attention")
    )
    shape = next(r for r in records if "seconds" in r)
    legend = translate(
        "legend",
        "Time relative to {base} without positions, interleaved with each contender (B{batch} H{heads} D{size}, {length} tokens, {dtype}, "
        "{machine}; {versions}). Extra memory: beyond the same, and as a share of a dense float32 [H, L, L] bias. "
        "Every contender's results were compared with the float64 reference first.",
    )
    ceiling = {"plain": "`scaled_dot_product_attention`", "flash attention": "PyTorch's FlashAttention"}[base]
    legend = legend.format(
        base=ceiling, batch=shape["batch"], heads=shape["heads"], size=shape["size"], length=length,
        dtype=result["dtype"], machine=describe_machine(result), versions=versions,
    )  # fmt: skip
    return f"{table((translate(heading, heading) for heading in headings), rows)}\n\n{legend}"


def _best(records: list[dict], name: str, kind: str, ceilings: list[str]) -> str:
    others = [
        r
        for r in records
        if r["workload"] == name and r["pass"] == kind and r["peer"] not in (*ceilings, "posenc") and "ratio" in r
    ]
    best = min(others, key=lambda r: r["ratio"], default=None)
    return "–" if best is None else f"{best['ratio']:.2f} × ({best['peer']})"


# ---- bench/results/README.md ------------------------------------------------------------------------------------------
# forward, forward + backward, and extra memory as a share of a dense float32 [H, L, L] bias
CPU = {
    "t5": (1.08, 1.3, 0.02),
    "clipped": (1.08, 1.3, 0.02),
    "alibi": (1.08, 1.3, 0.02),
    "t5-causal": (1.15, 1.4, 0.02),
    "clipped-causal": (1.15, 1.4, 0.02),
    "alibi-causal": (1.15, 1.4, 0.02),
    "shaw": (1.35, 2.0, 0.10),
    "shaw-values": (1.7, 2.5, 0.10),
    "deberta": (2.5, 3.2, 0.15),
    "transformer_xl": (2.0, 3.0, 0.15),
    "t5-decode": (1.4, None, None),
}
# relative to FlashAttention: forward, forward + backward
GPU = {
    **dict.fromkeys(
        ("t5", "t5-causal", "clipped", "clipped-causal", "alibi-learned", "alibi-learned-causal"), (1.0, 1.0)
    ),
    **dict.fromkeys(("shaw", "shaw-causal"), (1.0, 1.3)),
    **dict.fromkeys(("shaw-values", "shaw-values-causal"), (None, 1.7)),
    "relative_logits": (None, 1.6),
    "deberta": (None, 2.0),
    "transformer_xl": (None, 3.0),
    **dict.fromkeys(("rope", "rope-causal"), (None, 1.1)),
}
PASSES = ("forward", "training")


def cell(value: float | None, goal: float | None, text: str) -> str:
    if value is None:
        return "–"
    return f"**{text}**" if goal is not None and value > goal else text


def ours(result: dict, length: int) -> dict[tuple[str, str], dict]:
    records = [r for r in result["records"] if r["length"] == length and r["peer"] == "posenc" and "ratio" in r]
    return {(r["workload"], r["pass"]): r for r in records}


def cpu(result: dict) -> str:
    found = ours(result, 4096)
    base = result["ceilings"][0]
    rows = []
    for name, (*goals, most) in CPU.items():
        cells, shares = [name], []
        for kind, goal in zip(PASSES, goals):
            record = found.get((name, kind))
            if record is None:
                cells += ["–", "–" if goal is None else f"{goal} ×"]
                continue
            text = f"{record['ratio']:.2f} ×" + (f" ± {record['spread']:.2f}" if "spread" in record else "")
            cells += [cell(record["ratio"], goal, text), f"{goal} ×"]
            extra = extra_bytes(record, result["records"], base)
            if extra is not None and most is not None:
                share = max(0, extra) / (record["heads"] * 4 * record["length"] ** 2)
                shares.append(cell(share, most, f"{share:.1%}"))
        rows.append([*cells, " / ".join(shares) or "–", "–" if most is None else f"{most:.0%}"])
    return table(
        ("plan", "forward", "goal", "forward + backward", "goal", "extra memory, forward / training", "goal"), rows
    )


def gpu(result: dict) -> str:
    head = (
        "plan",
        "tokens",
        "forward",
        "goal",
        "forward + backward",
        "goal",
        "of cuDNN",
        "extra memory, forward / training",
    )
    rows = []
    measured = {(r["workload"], r["peer"], r["length"], r["pass"]): r for r in result["records"] if "seconds" in r}
    for length in sorted({key[2] for key in measured}):
        for name, goals in GPU.items():
            mine = [measured.get((name, "posenc", length, kind)) for kind in PASSES]
            if mine == [None, None]:
                continue
            cells, memory, cudnn = [], [], []
            for kind, goal, record in zip(PASSES, goals, mine):
                if record is None:
                    cells += ["–", "–"]
                    continue
                cells += [cell(record["ratio"], goal, f"{record['ratio']:.2f} ×"), "–" if goal is None else f"{goal} ×"]
                extra = extra_bytes(record, result["records"], result["ceilings"][0])
                memory.append(f"{(extra or 0) / 2**20:.0f} MiB")
                other = measured.get((name, "cudnn", length, kind))
                cudnn.append("–" if other is None else f"{record['seconds'] / other['seconds']:.2f}")
            batch = next(r for r in mine if r is not None)["batch"]
            rows.append([name, f"{batch} × {length}", *cells, " / ".join(cudnn) + " ×", " / ".join(memory)])
    return table(head, rows)


def contenders(result: dict, length: int) -> str:
    """Every contender's times at one length, forward / training."""
    measured = {(r["workload"], r["peer"], r["pass"]): r for r in result["records"] if r["length"] == length}
    names = list(dict.fromkeys(key[0] for key in measured))
    peers = [p for p in result["versions"] if any(k[1] == p and "seconds" in r for k, r in measured.items())]
    rows = []
    for name in names:
        cells = []
        for peer in peers:
            pair = [measured.get((name, peer, kind), {}) for kind in PASSES]
            if any("seconds" in r for r in pair):
                cells.append(" / ".join(milliseconds(r["seconds"]) if "seconds" in r else "–" for r in pair))
            else:
                cells.append("–")
        rows.append([name, *cells])
    return table(["plan", *peers], rows)


def exponents(result: dict) -> str:
    """Exponents, a row for each workload and contender: forward, then training."""
    head = "plan", "contender", "time, forward", "time, training", "extra memory, forward", "extra memory, training"
    found: dict[tuple, dict] = {}
    for line in growth(result):
        found.setdefault((line["workload"], line["peer"]), {})[line["pass"]] = line
    rows = []
    for names, both in found.items():
        cells = [(both.get(kind, {what: None}), what) for what in ("time", "extra_memory") for kind in PASSES]
        rows.append(
            [*names, *("–" if line[what] is None else f"{line[what]:.2f} (to {line['to']})" for line, what in cells)]
        )
    return table(head, rows)


def days(result: dict) -> str:
    """When each length was measured."""
    found: dict[int, set[str]] = {}
    for r in result["records"]:
        if "when" in r:
            found.setdefault(r["length"], set()).add(r["when"][:10])
    return "; ".join(f"{length} tokens: {' and '.join(sorted(dates))}" for length, dates in sorted(found.items()))


def section(cpu_result: dict, gpu_result: dict) -> str:
    """Everything between the markers."""
    busy = [r["busy"] for r in cpu_result["records"] if "busy" in r]
    dates = sorted(r["when"][:16] for r in cpu_result["records"] if "when" in r)
    parts = [
        "## CPU, against the goals (B1 H8 L4096 D64)",
        f"{describe_machine(cpu_result)}, {cpu_result['dtype']}; measured {dates[0]} to {dates[-1]} UTC. Bold: the goal is missed. "
        f"± is half the interquartile range of the rounds' ratios. Other processes used {statistics.median(busy):.0%} of the cores "
        f"in the median, {max(busy):.0%} at worst.",
        cpu(cpu_result),
        "### Every contender at 4096 tokens, forward / training step",
        contenders(cpu_result, 4096),
        "Not timed:",
        "\n".join(
            f"- {line}" for line in not_timed([r for r in cpu_result["records"] if "would" in r.get("note", "")])
        ),
        "### Growth with the number L of tokens, from 512 on: exponents of time and of extra memory",
        exponents(cpu_result),
        "## GPU, against the goals",
        f"{describe_machine(gpu_result)}, {gpu_result['dtype']}, 16 heads, D64 (relative_logits: 128); {days(gpu_result)}. Times of replayed CUDA "
        "graphs, relative to PyTorch's FlashAttention without positions. Bold: missed.",
        gpu(gpu_result),
        "### Every contender at 4 × 4096 tokens, forward / training step",
        contenders(gpu_result, 4096),
    ]
    if any(r["length"] == 16384 for r in gpu_result["records"]):
        parts += ["### and at 1 × 16384 tokens", contenders(gpu_result, 16384)]
    return "\n\n".join(part for part in parts if part)
