"""Rewrite README's performance table from bench/results/results.json: make bench-table."""

import json
from pathlib import Path

from posenc.bench.report import markdown

ROOT = Path(__file__).parent.parent
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
LENGTH = 4096


def rewrite(text: str, table: str) -> str:
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n## Speed\n\n{table}\n{END}{after}"


def main() -> None:
    result = json.loads((ROOT / "bench" / "results" / "results.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(rewrite(readme.read_text(), markdown(result, LENGTH)))


if __name__ == "__main__":
    main()
