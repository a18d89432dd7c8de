"""Tables and numbers of the pages, read from the committed results: a page never repeats a measured number by hand."""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path

from posenc.encodings.registry import ENCODINGS, OWN_ATTENTION
from posenc.engines.choose import ENGINES
from posenc.lab import published, results, verdict
from posenc.lab.results import Mean
from posenc.lab.texts import Words

from . import markdown, speed_tables, texts

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "results"
OUTCOMES = {
    "holds": "保持",
    "loses": "变差",
    "breaks": "失效",
    "cannot": "不能",
    "not learnt": "未学会",
    "missing": "–",
}


def outcome_in(language: str, outcome: str) -> str:
    return outcome if language == "en" else OUTCOMES[outcome]


@cache
def run(name: str) -> results.Results:
    return results.read(ROOT / "docs" / "results" / name)


def cell(point: Mean | str | None, digits: int) -> str:
    if not isinstance(point, Mean):
        return "–"
    half = "" if point.half is None else f" ± {point.half:.{digits}f}"
    return f"{point.value:.{digits}f}{half}"


def lab(name: str, language: str, sizes: tuple[int, ...], digits: int) -> str:
    """Loss on text at several sizes, best at the largest first, and the outcome there."""
    found, task = run(name), run(name).tasks()[0]
    rows = []
    for standing in verdict.standings(found, task, sizes[-1]):
        cells = [cell(found.point(task, standing.encoding, size, "loss"), digits) for size in sizes]
        rows.append([f"`{standing.encoding}`", *cells, outcome_in(language, standing.outcome)])
    return markdown.table(["", *sizes, ""], rows)


def lab_steps(language: str) -> str:
    """`paper`'s loss at the training length and at the largest, and the verdict, after each number of training steps."""
    found, task = run("paper"), run("paper").tasks()[0]
    steps = found.steps(task)
    head = [f"{step:,} steps" if language == "en" else f"{step:,} 步" for step in steps]
    rows = [
        [f"`{name}`", *(f"{s.change} {outcome_in(language, s.outcome)}" if s.far else "–" for s in standings)]
        for name, standings in verdict.by_steps(found, task)
    ]
    return markdown.table(["", *head], rows)


def lab_all(metric: str, digits: int) -> str:
    """`paper`'s losses at every length, best at the largest first."""
    found, task = run("paper"), run("paper").tasks()[0]
    far = max(task["test"])
    points = {name: found.point(task, name, far, metric) for name in found.encodings(task)}
    order = sorted(points, key=lambda name: point.value if isinstance(point := points[name], Mean) else 1e9)
    rows = [[f"`{name}`", *(cell(found.point(task, name, n, metric), digits) for n in task["test"])] for name in order]
    return markdown.table(["encoding", *task["test"]], rows)


def lab_published() -> str:
    """The change of the loss from the training length on: as published, and here."""
    found, task = run("paper"), run("paper").tasks()[0]
    sizes = [size for size in task["test"] if size != task["train"]]
    table = []
    every = {name: published.rows(name, found) for name in published.TABLES}
    for encoding in dict.fromkeys(row[0] for rows in every.values() for row in rows if row[3] is not None):
        for name, rows in every.items():
            scale = task["train"] / published.TABLES[name][1][0]  # the same multiple of the training length
            own = {row[1] * scale: row[2] for row in rows if row[0] == encoding}
            if own:
                nearest = [[change for size, change in own.items() if abs(math.log(size / at)) < 0.25] for at in sizes]
                cells = [f"{changes[0]:+.2f}" if changes else "" for changes in nearest]
                table.append([f"`{encoding}`, {published.TABLES[name][0].split(' (')[0]}'s table", *cells])
        ends = [found.point(task, encoding, size, "loss") for size in (task["train"], *sizes)]
        cells = [f"{p.value - ends[0].value:+.2f}" if isinstance(p, Mean) else "–" for p in ends[1:]]  # type: ignore[union-attr]
        table.append([f"`{encoding}` here", *cells])
    return markdown.table(["", *sizes], table).replace("-0.", "−0.").replace("-1.", "−1.")


def lab_agreement(language: str) -> str:
    """Where `paper` agrees with the published tables and where not."""
    words = Words(language)
    return "\n".join(f"- {published.sentence(name, run('paper'), words)}" for name in published.TABLES)


def lab_moved(language: str) -> str:
    """The verdicts that were others earlier in the training, with the steps, as one phrase."""
    found, task = run("paper"), run("paper").tasks()[0]
    steps, parts = found.steps(task), []
    for encoding, standings in verdict.by_steps(found, task):
        earlier: dict[str, list[str]] = {}
        for step, one in zip(steps, standings):
            if one.outcome not in ("missing", standings[-1].outcome):
                earlier.setdefault(one.outcome, []).append(f"{step:,}")
        words = [f"{outcome_in(language, one)} ({', '.join(at)})" for one, at in earlier.items()]
        parts += [f"`{encoding}` {', '.join(words)}"] if words else []
    return ", ".join(parts) or "–"


def encodings(language: str) -> str:
    head = {
        "en": ["name", "class", "where it enters", "parameters", "past the training length"],
        "zh": ["名称", "类", "在哪里进入", "参数量", "超过训练长度时"],
    }[language]
    rows = []
    for name, one in {**ENCODINGS, **OWN_ATTENTION}.items():
        words = texts.FACTS.get(name, {}) if language == "zh" else {}
        ends = words.get("enters", one.enters), one.parameters, words.get("extrapolates", one.extrapolates)
        rows.append([f"[`{name}`]({name}.md)", f"`{one.public_name.removeprefix('posenc.')}`", *ends])
    return markdown.table(head, rows)


def engines(language: str) -> str:
    rows = texts.ENGINES[language]
    assert list(rows) == list(ENGINES), "texts.ENGINES must name the engines in the order of posenc.ENGINES"
    head = {"en": ["engine", "runs on", "how"], "zh": ["引擎", "运行于", "方式"]}[language]
    return markdown.table(head, ([f"`{name}`", *facts] for name, facts in rows.items()))


def hugging_face(language: str) -> str:
    """Whole models before and after; memory above the loaded model, or all of it (`peak_bytes`)."""
    words = {"en": ("forward", "training step"), "zh": ("前向", "训练一步")}[language]
    head = {
        "en": ["model", "", "transformers", "accelerated", "time", "memory"],
        "zh": ["模型", "", "transformers", "加速后", "时间", "内存"],
    }[language]
    rows = []
    for where, file in (("CPU", "hf-cpu"), ("H200", "hf-cuda")):
        for name, one in json.loads((BENCH / f"{file}.json").read_text())["models"].items():
            for what, word in zip(one["original"], words):
                pair = [one[way][what] for way in ("original", "accelerated")]
                old, new = pair
                size = "extra_bytes" if "extra_bytes" in old else "peak_bytes"
                cells = [f"{1000 * cell['seconds']:.0f} ms, {cell[size] / 2**20:.0f} MiB" for cell in pair]
                ratios = [f"{old[key] / new[key]:.1f} ×" for key in ("seconds", size)]
                rows.append([f"{name}, {where}", word, *cells, *ratios])
    return markdown.table(head, rows)


def speed(name: str, language: str) -> str:
    labels = None if language == "en" else speed_tables.CHINESE
    return speed_tables.markdown(speed_tables.load(name), speed_tables.LENGTH, labels)


def ratios(name: str, kind: str) -> list[tuple[float, str]]:
    """posenc's time relative to attention without positions at the table's length, lowest first."""
    records = speed_tables.load(name)["records"]
    own = [r for r in records if r["peer"] == "posenc" and r["pass"] == kind and r["length"] == speed_tables.LENGTH]
    return sorted((r["ratio"], r["workload"]) for r in own if "ratio" in r and "decode" not in r["workload"])


def speed_line(name: str, kind: str) -> list[str]:
    """best, median and worst"""
    return best_to_worst({workload: ratio for ratio, workload in ratios(name, kind)})


def best_to_worst(found: dict[str, float]) -> list[str]:
    """Of ratios by name: best, median and worst."""
    ends = [
        f"{found[name]:.2f} × (`{name}`)"
        for name in (min(found, key=found.__getitem__), max(found, key=found.__getitem__))
    ]
    return [ends[0], f"{statistics.median(found.values()):.2f} ×", ends[1]]


USES = {
    "model": ("models of transformers", "transformers 的模型"),
    "layer": ("layers", "层"),
    "masked": ("layers with padding and other masks", "带填充和其他掩码的层"),
    "call": ("attention calls", "注意力调用"),
    "host": ("host time of short calls", "短调用的主机时间"),
    "decode": ("decoding", "解码"),
    "windows": ("image windows", "图像窗口"),
    "compiled": ("compiled models", "编译后的模型"),
    "generate": ("`generate`", "`generate`"),
    "lengths": ("changing lengths", "变化的长度"),
}
"""Groups of the suite of uses, with their names."""


def uses(device: str) -> dict:
    """The committed run of the suite of uses."""
    return json.loads((BENCH / f"uses-{device}.json").read_text())


def uses_line(device: str, *groups: str) -> list[str] | None:
    """best, median and worst of the groups' ratios; None if they were not run"""
    cells = {
        "/".join(name.split("/")[len(groups) == 1 :]): cell["ratio"]
        for name, cell in uses(device)["cells"].items()
        if cell["group"] in groups and "ratio" in cell
    }
    return best_to_worst(cells) if cells else None


HEAD = {"en": ["best", "median", "worst"], "zh": ["最好", "中位数", "最差"]}
AGAINST = {
    "uses": {"en": "relative to the best other code", "zh": "相对于最好的其他代码"},
    "plain": {"en": "relative to attention without positions", "zh": "相对于不带位置的注意力"},
}


def speed_summary(language: str) -> str:
    """Against attention without positions at 4096 tokens."""
    words = {
        "en": {("results.json", "training"): "training step, CPU", ("results.json", "forward"): "forward, CPU",
               ("h200.json", "training"): "training step, H200", ("h200.json", "forward"): "forward, H200"},
        "zh": {("results.json", "training"): "训练一步，CPU", ("results.json", "forward"): "前向，CPU",
               ("h200.json", "training"): "训练一步，H200", ("h200.json", "forward"): "前向，H200"},
    }[language]  # fmt: skip
    rows = [[label, *speed_line(*key)] for key, label in words.items()]
    return markdown.table([AGAINST["plain"][language], *HEAD[language]], rows)


def uses_table(language: str) -> str:
    """A row for each group of uses on each device."""
    rows = []
    for device, name in (("cuda", "H200"), ("cpu", "CPU")):
        lines = {group: uses_line(device, group) for group in USES}
        comma = ", " if language == "en" else "，"
        rows += [[f"{USES[group][language == 'zh']}{comma}{name}", *line] for group, line in lines.items() if line]
    return markdown.table([AGAINST["uses"][language], *HEAD[language]], rows)


def readme_speed(language: str) -> str:
    """The lines of a README: what people run, beside the best other code; and the ceiling, attention without positions."""
    models = ("model", "generate")
    used = [group for group in USES if group not in (*models, "host")]  # a clock of its own: until a call has returned
    lines = {
        ("T5 and DeBERTa models: H200", "T5 与 DeBERTa 模型：H200"): uses_line("cuda", *models),
        ("layers, calls, decoding: H200", "层、调用、解码：H200"): uses_line("cuda", *used),
        ("the same on a CPU", "CPU 上同样"): uses_line("cpu", *models, *used),
        ("host time of a short call", "短调用的主机时间"): uses_line("cuda", "host"),
        ("4096 tokens, training, against no positions: H200", "4096 词元，训练，与无位置相比：H200"): speed_line("h200.json", "training"),
        ("the same on a CPU", "CPU 上同样 "): speed_line("results.json", "training"),
    }  # fmt: skip
    rows = [[label[language == "zh"].strip(), *line] for label, line in lines.items() if line is not None]
    return markdown.table([AGAINST["uses"][language], *HEAD[language]], rows)


TABLES = {
    "lab-quick": lambda language: lab("quick", language, (64, 128, 256, 512), 2),
    "lab-paper": lambda language: lab("paper", language, (512, 2048, 16384), 3),
    "lab-steps": lab_steps,
    "encodings": encodings,
    "engines": engines,
    "hugging-face": hugging_face,
    "speed-cpu": lambda language: speed("results.json", language),
    "speed-gpu": lambda language: speed("h200.json", language),
    "speed-summary": speed_summary,
    "uses-summary": uses_table,
}


LISTS = {"lab-agreement": lab_agreement}


def table(name: str, language: str) -> str:
    every = {**TABLES, **LISTS}
    if name not in every:
        raise ValueError(f"unknown table {name!r}; there are {', '.join(every)}")
    return every[name](language)


def value(argument: str) -> str:
    """`lab-quick rope 512`: the loss on text, two digits; `lab-paper rope 16384`: three."""
    name, encoding, size = argument.split()
    digits = {"lab-quick": 2, "lab-paper": 3}[name]
    found = run(name.removeprefix("lab-"))
    point = found.point(found.tasks()[0], encoding, int(size), "loss")
    if not isinstance(point, Mean):
        raise ValueError(f"{argument}: there is no number, but {point!r}")
    return f"{point.value:.{digits}f}"
