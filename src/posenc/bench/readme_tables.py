"""Speed tables from the published runs, for bench/results/README.md (make bench-table) and the documentation site."""

from __future__ import annotations

import json
from pathlib import Path

from ..core import files
from . import goals
from .growth import extra_bytes
from .report import describe_machine

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
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
    headings = [translate(heading, heading) for heading in headings]
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for name in dict.fromkeys(r["workload"] for r in records):
        own = {r["pass"]: r for r in records if r["workload"] == name and r["peer"] == "posenc" and "ratio" in r}
        if not own:
            continue
        extra = max((extra_bytes(r, records, base) or 0 for r in own.values() if "bytes" in r), default=0)
        some = next(iter(own.values()))
        cells = [name, *(f"{own[kind]['ratio']:.2f} ×" if kind in own else "–" for kind in ("forward", "training"))]
        cells.append(f"{max(0, extra) / 2**20:.0f} MiB ({max(0, extra) / (some['heads'] * 4 * length**2):.1%})")
        cells += [_best(records, name, kind, result["ceilings"]) for kind in ("forward", "training")]
        lines.append("| " + " | ".join(cells) + " |")
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
    return "\n".join([*lines, "", legend])


def _best(records: list[dict], name: str, kind: str, ceilings: list[str]) -> str:
    others = [
        r
        for r in records
        if r["workload"] == name and r["pass"] == kind and r["peer"] not in (*ceilings, "posenc") and "ratio" in r
    ]
    best = min(others, key=lambda r: r["ratio"], default=None)
    return "–" if best is None else f"{best['ratio']:.2f} × ({best['peer']})"


def between(text: str, inside: str) -> str:
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{inside}\n{END}{after}"


PAGES = {
    "bench/results/README.md": lambda: goals.section(load("results.json"), load("h200.json")),
}


def rewritten(name: str) -> str:
    return between((ROOT / name).read_text(encoding="utf-8"), PAGES[name]())


def main() -> None:
    for name in PAGES:
        files.write(ROOT / name, rewritten(name).encode())


if __name__ == "__main__":
    main()
