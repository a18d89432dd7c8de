"""Rewrite the tables of the READMEs and of bench/results/README.md from the published runs: make bench-table."""

import json
from pathlib import Path

from ..core import files
from . import goals
from .table import markdown

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
LENGTH = 4096
ENGLISH = {
    "heading": "## Speed",
    "gpu": "On a GPU, four sequences of 4096 tokens:",
    "more": "`posenc bench` (or `make bench`) measures this on your machine, `--device cuda` on its GPU. All contenders and lengths, "
    "how time and memory grow, and the goals not reached: [bench/results](bench/results/README.md).",
}
CHINESE = {
    "heading": "## 速度",
    "gpu": "在 GPU 上，四条 4096 个词元的序列：",
    "more": "`posenc bench`（或 `make bench`）在你的机器上测量，`--device cuda` 用 GPU。全部对照与长度、时间和内存的增长以及尚未达到的目标："
    "[bench/results](bench/results/README.md)。",
    "plan": "方案",
    "forward": "前向",
    "training step": "训练一步",
    "extra memory": "额外内存",
    "best peer, forward": "最好的同类，前向",
    "best peer, training": "最好的同类，训练",
    "legend": "时间是相对于不带位置的 {base} 的倍数，每个对照都与它轮流测量（B{batch} H{heads} D{size}，{length} 个词元，{dtype}，{machine}；"
    "{versions}）。额外内存：超出同一基准的部分，括号内为占稠密 float32 [H, L, L] 偏置的比例。所有结果都先与 float64 参考值核对。",
}


def load(name: str) -> dict | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def section(words: dict[str, str]) -> str:
    parts = [words["heading"]]
    for name, intro in (("results.json", None), ("h200.json", "gpu")):
        result = load(name)
        # a GPU run without FlexAttention has not met the best peer
        if result is not None and "flex attention" in result["versions"]:
            parts += ([] if intro is None else [words[intro]]) + [markdown(result, LENGTH, words)]
    return "\n\n".join([*parts, words["more"]])


def between(text: str, inside: str) -> str:
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{inside}\n{END}{after}"


PAGES = {
    "README.md": lambda: section(ENGLISH),
    "README.zh-CN.md": lambda: section(CHINESE),
    "bench/results/README.md": lambda: goals.section(load("results.json"), load("h200.json")),
}


def rewritten(name: str) -> str:
    return between((ROOT / name).read_text(encoding="utf-8"), PAGES[name]())


def main() -> None:
    for name in PAGES:
        files.write(ROOT / name, rewritten(name).encode())


if __name__ == "__main__":
    main()
