"""Rewrite the READMEs' performance table from bench/results/results.json: make bench-table."""

import json
import os
from pathlib import Path

from posenc.bench.report import markdown

ROOT = Path(__file__).parent.parent
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
LENGTH = 4096
HEADINGS = {"README.md": "## Speed", "README.zh-CN.md": "## 速度"}
CHINESE = {
    "| plan | forward | training step | extra memory | best peer, forward | best peer, training |": (
        "| 方案 | 前向 | 训练一步 | 额外内存 | 最好的同类，前向 | 最好的同类，训练 |"
    ),
}


def rewrite(text: str, heading: str, table: str) -> str:
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{heading}\n\n{table}\n{END}{after}"


def main() -> None:
    result = json.loads((ROOT / "bench" / "results" / "results.json").read_text(encoding="utf-8"))
    table = markdown(result, LENGTH)
    for name, heading in HEADINGS.items():
        words = CHINESE if "zh" in name else {}
        shown = table
        for english, chinese in words.items():
            if english not in shown:
                raise SystemExit(f"bench/table.py translates a header that is no longer there: {english}")
            shown = shown.replace(english, chinese)
        path = ROOT / name
        unfinished = path.with_suffix(".part")
        unfinished.write_text(rewrite(path.read_text(encoding="utf-8"), heading, shown), encoding="utf-8")
        os.replace(unfinished, path)


if __name__ == "__main__":
    main()
