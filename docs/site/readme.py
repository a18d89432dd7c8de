"""Rewrite the generated parts of the READMEs, docs/lab.md and bench/results/README.md: `make bench-table`, or
`python -m docs.site.readme`.

Encodings come from the registry, verdicts from docs/results, speed from bench/results: uses-cpu.json,
uses-cuda.json, results.json and h200.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from posenc.encodings.registry import ENCODINGS
from posenc.lab import verdict

from . import markdown, speed_tables, tables, texts

ROOT = Path(__file__).parents[2]
READMES = {"README.md": "en", "README.zh-CN.md": "zh"}


def encodings(language: str) -> str:
    head = {"en": ["name", "enters at", "past the training length"], "zh": ["名称", "进入之处", "超过训练长度时"]}[
        language
    ]
    rows: dict[tuple, list[str]] = {}  # {facts in every language: names}, so that languages have the same rows
    for name in ENCODINGS:
        rows.setdefault(tuple(_facts(name, each) for each in READMES.values()), []).append(f"`{name}`")
    at = list(READMES.values()).index(language)
    return markdown.table(head, ([", ".join(names), *facts[at]] for facts, names in rows.items()))


def _facts(name: str, language: str) -> tuple[str, str]:
    """Where an encoding enters, and what it does past the training length: the answer, its reasons are on its page."""
    one, words = ENCODINGS[name], texts.FACTS.get(name, {}) if language == "zh" else {}
    return words.get("enters", one.enters), re.split("[:;,：；，]", words.get("extrapolates", one.extrapolates))[0]


def lab(language: str) -> str:
    """What holds, what loses and what breaks in the published runs: a line for each outcome."""
    found = [(tables.run(name), tables.run(name).tasks()[0]) for name in ("quick", "paper")]
    lines = []
    for outcome, label in (("holds", "holds"), ("loses", "loses quality"), ("breaks", "breaks")):
        parts = []
        for results, task in found:
            far = max(task["test"])
            found_here = [
                s for s in verdict.standings(results, task, far) if s.outcome == outcome and "+" not in s.encoding
            ]
            named = ", ".join(f"`{s.encoding}`" for s in found_here)
            parts += [f"{task['train']} → {far}: {named}"] if named else []
        label = label if language == "en" else tables.OUTCOMES[outcome]
        lines += [f"- **{label}**: " + "; ".join(parts)] if parts else []
    results, task = found[-1]
    if results.steps(task):
        seeds, moved = results.seeds(task), tables.lab_moved(language)
        number = seeds.split(" seed")[0].replace(" to ", " 到 ")
        lines.append({
            "en": f"- 512 → 16384: {task['steps']:,} steps, {seeds}; earlier: {moved}",
            "zh": f"- 512 → 16384: {task['steps']:,} 步，{number} 个种子; 早先: {moved}",
        }[language])  # fmt: skip
    text = "\n".join(lines)
    return text if language == "en" else text.replace(": ", "：").replace("; ", "；").replace("`, `", "`、`")


PARTS = {"encodings": encodings, "lab": lab, "speed": tables.readme_speed}
LAB_PARTS = {
    "paper_losses": lambda language: tables.lab_all("loss", 3),
    "paper_steps": tables.lab_steps,
    "paper_sliding": lambda language: tables.lab_all("sliding", 2),
    "paper_published": lambda language: tables.lab_published(),
    "paper_agreement": tables.lab_agreement,
}
BENCH_PARTS = {
    "bench": lambda language: speed_tables.section(speed_tables.load("results.json"), speed_tables.load("h200.json"))
}
FILES = {**dict.fromkeys(READMES, PARTS), "docs/lab.md": LAB_PARTS, "bench/results/README.md": BENCH_PARTS}


def rewritten(name: str) -> str:
    """A file with its generated parts made anew."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for part, make in FILES[name].items():
        start, end = f"<!-- {part}:start -->", f"<!-- {part}:end -->"
        before, rest = text.split(start, 1)
        _, after = rest.split(end, 1)
        made = make(READMES.get(name, "en"))
        text = f"{before}{start}\n{made}\n{end}{after}"
    return text


def published_quick() -> str:
    """src/posenc/plot/published_quick.json: the losses that the course's last figure draws, without the whole run."""
    found, task = tables.run("quick"), tables.run("quick").tasks()[0]
    kept = ("alibi", "clipped", "t5", "rope", "rope+yarn:4,beta_fast=4", "none", "sinusoidal")
    loss = {name: [round(found.point(task, name, size, "loss").value, 4) for size in task["test"]] for name in kept}  # type: ignore[union-attr]
    return json.dumps({"train": task["train"], "test": list(task["test"]), "loss": loss}, indent=1) + "\n"


if __name__ == "__main__":
    (ROOT / "src/posenc/plot/published_quick.json").write_text(published_quick(), encoding="utf-8")
    for name in FILES:
        (ROOT / name).write_text(rewritten(name), encoding="utf-8")
