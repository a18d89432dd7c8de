"""Rewrite the READMEs' performance tables from bench/results/: make bench-table."""

import json
import os
from pathlib import Path

from posenc.bench.table import markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
LENGTH = 4096
ENGLISH = {
    "heading": "## Speed",
    "gpu": "On a GPU, training steps and forward passes of 4096 tokens each:",
    "more": "All lengths, peers and what was not reached: [bench/results](bench/results/README.md).",
}
CHINESE = {
    "heading": "## 速度",
    "gpu": "在 GPU 上，每条序列 4096 个词元：",
    "more": "所有长度、同类库以及尚未达到的目标见 [bench/results](bench/results/README.md)。",
    "plan": "方案",
    "forward": "前向",
    "training step": "训练一步",
    "extra memory": "额外内存",
    "best peer, forward": "最好的同类，前向",
    "best peer, training": "最好的同类，训练",
    "legend": "时间是同一次运行中相对于不带位置的 {base} 的倍数（B{batch} H{heads} D{size}，{length} 个词元，{dtype}，{machine}；"
    "{versions}）。额外内存：超出同一基准的部分，括号内为占稠密 float32 [H, L, L] 偏置的比例。所有结果都先与 float64 参考值核对。",
}


def section(words: dict[str, str]) -> str:
    parts = [words["heading"]]
    for name, intro in (("results.json", None), ("h200.json", "gpu")):
        path = RESULTS / name
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            parts += ([] if intro is None else [words[intro]]) + [markdown(result, LENGTH, words)]
    return "\n\n".join([*parts, words["more"]])


def rewrite(text: str, words: dict[str, str]) -> str:
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{section(words)}\n{END}{after}"


def main() -> None:
    for name, words in (("README.md", ENGLISH), ("README.zh-CN.md", CHINESE)):
        path = ROOT / name
        unfinished = path.with_suffix(".part")
        unfinished.write_text(rewrite(path.read_text(encoding="utf-8"), words), encoding="utf-8")
        os.replace(unfinished, path)


if __name__ == "__main__":
    main()
