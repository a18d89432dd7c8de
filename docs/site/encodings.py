"""A page for each encoding: registry entry, docstring, options, figures, lab and speed, and the hand-written part."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from posenc.cli import pictures
from posenc.encodings.registry import CAUSAL, ENCODINGS, OWN_ATTENTION, EncodingInfo
from posenc.lab import verdict
from posenc.plot import analysis

from . import docstrings, markdown, speed_tables, tables, texts

DOCS = Path(__file__).parents[1]
WORDS = {
    "en": dict(
        when="When to use it", facts="In short", formula="Formula", options="Options", shapes="Shapes", picture="Picture",
        lab="In the lab", speed="Cost", enters="enters at", parameters="parameters", beyond="past the training length",
        used="used by", family="family", cls="class", function="function", option="option", default="default", causal="in a causal layer",
        parameter="parameter", shape="shape", none="It has no parameters.", sizes="For d_model=512 and heads=8:",
        needed="required", untested="The published runs of the lab do not train this encoding.",
        lab_intro="Loss on text in nats per byte at the training length and past it ([all results](../results/lab-results.md)):",
        length="length", loss="loss", outcome="outcome",
        speed_intro="Time relative to attention without positions, 4096 tokens ([all figures](../results/benchmarks.md)):",
        speed_shorter="Time relative to attention without positions, eager calls of shorter texts with their host time (docs/encodings/speed.md):",
        device="device", forward="forward", training="training step", tokens="tokens",
        caption="What {name} does to the scores: over distance, over (i, j), and its own vectors or table",
        caption_none="Without positions there is nothing to draw.", unmeasured="The published benchmarks do not time it on its own.",
        reference="Options and errors in the reference: ", english="",
        own_lab="`posenc compare --encodings {name}` trains it in a layer of its own ([the lab](../results/lab.md#attention-of-its-own)).",
        tensors="q [B, H, Lq, D], the last Lq of the Lk tokens of k and v [B, Hkv, Lk, D]; the output is [B, H, Lq, D].",
    ),
    "zh": dict(
        when="什么时候用", facts="概要", formula="公式", options="选项", shapes="形状", picture="图",
        lab="实验室结果", speed="代价", enters="进入之处", parameters="参数量", beyond="超过训练长度时",
        used="使用它的模型", family="类别", cls="类", function="函数", option="选项", default="默认值", causal="在因果层中",
        parameter="参数", shape="形状", none="它没有参数。", sizes="d_model=512、heads=8 时：",
        needed="必填", untested="已发布的实验没有训练这种编码。",
        lab_intro="文本上的损失（nat/字节），在训练长度处和超过它时（[全部结果](../results/lab-results.md)）：",
        length="长度", loss="损失", outcome="结论",
        speed_intro="相对于不带位置的注意力的时间，4096 个词元（[全部数字](../results/benchmarks.md)）：",
        speed_shorter="相对于不带位置的注意力的时间，较短文本的即时调用，含主机时间（docs/encodings/speed.md）：",
        device="设备", forward="前向", training="训练一步", tokens="个词元",
        caption="{name} 对分数的作用：随距离、随 (i, j)，以及它自己的向量或表",
        caption_none="没有位置，就没有可画的东西。", unmeasured="已发布的基准没有单独测量它。",
        reference="参考文档中的选项与报错：", english="下面是代码中的说明（英文）：\n\n",
        own_lab="`posenc compare --encodings {name}` 用它自己的层训练它（[实验室](../results/lab.md#attention-of-its-own)）。",
        tensors="q [B, H, Lq, D] 是 k、v [B, Hkv, Lk, D] 的 Lk 个词元中的最后 Lq 个；输出为 [B, H, Lq, D]。",
    ),
}  # fmt: skip


def pages(language: str) -> dict[str, str]:
    return {f"encodings/{name}.md": page(info, language) for name, info in {**ENCODINGS, **OWN_ATTENTION}.items()}


def classes() -> list[str]:
    """The classes of the registry and those around them."""
    return [*(info.class_name for info in ENCODINGS.values()), "Randomized"]


def page(info: EncodingInfo, language: str) -> str:
    words = WORDS[language]
    cls = info.load()
    facts = texts.FACTS.get(info.name, {}) if language == "zh" else {}
    rows = [
        (words["function"] if inspect.isfunction(cls) else words["cls"], f"`{info.public_name}`"),
        (words["enters"], facts.get("enters", info.enters)),
        (words["parameters"], info.parameters),
        (words["beyond"], facts.get("extrapolates", info.extrapolates)),
        (words["used"], info.used_by),
    ]
    if info.name in CAUSAL:
        rows.append((words["causal"], ", ".join(f"`{key}={value!r}`" for key, value in CAUSAL[info.name].items())))
    caption = words["caption"].format(name=info.name)
    drawn = words["caption_none"] if info.name == "none" else f"![{caption}](figure:overview-{info.name})"
    if info.name in OWN_ATTENTION:
        drawn = "```text\n" + "\n".join(pictures.draw(info.name, pictures.Options({}))) + "\n```"
    parts = [
        f"# {info.name}",
        "| | |\n| --- | --- |\n" + "\n".join(f"| {key} | {value} |" for key, value in rows),
        f"## {words['when']}",
        handwritten(info.name, language),
        f"## {words['formula']}",
        f"```text\n{info.formula}\n```",
        words["english"] + docstrings.show(cls.__doc__ or ""),
        f"## {words['picture']}",
        drawn,
        f"## {words['options']}",
        options(info, words),
        f"## {words['shapes']}",
        shapes(info, words),
        f"## {words['lab']}",
        words["own_lab"].format(name=info.name) if info.name in OWN_ATTENTION else lab(info.name, language),
        f"## {words['speed']}",
        speed(info.name, words),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def handwritten(name: str, language: str) -> str:
    """docs/LANGUAGE/encodings/NAME.md: the part that no program can write."""
    path = DOCS / language / "encodings" / f"{name}.md"
    if not path.exists():
        raise FileNotFoundError(f"docs/{language}/encodings/{name}.md is missing: write when to use {name}")
    return path.read_text(encoding="utf-8").strip()


def options(info: EncodingInfo, words: dict[str, str]) -> str:
    rows = []
    made = info.load()
    for name, parameter in inspect.signature(made if inspect.isfunction(made) else made.__init__).parameters.items():
        if name == "self":
            continue
        default = words["needed"] if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        annotation = str(parameter.annotation).replace("|", "&#124;")  # a bar would end the cell
        rows.append([f"`{name}`: <code>{annotation}</code>", default])
    if not rows:
        return ""
    page = {"nn": "layers", "contextual": "more"}.get(info.module.split(".")[1], "encodings")
    reference = f"{words['reference']}[`{info.public_name}`](../api/{page}.md#{info.public_name})"
    return f"{markdown.table((words['option'], words['default']), rows)}\n\n{reference}"


def shapes(info: EncodingInfo, words: dict[str, str]) -> str:
    if inspect.isfunction(info.load()):
        return words["tensors"]
    if info.name in OWN_ATTENTION:
        made = info.load()(512, 8, kv_rank=128, nope_dim=32, rope_dim=32, v_dim=64)
    else:
        made = analysis.subject(info.name).encoding  # with d_model=512, heads=8 and the options that drawings need
    rows = [(f"`{name}`", list(parameter.shape)) for name, parameter in made.named_parameters()]
    if not rows:
        return words["none"]
    return f"{words['sizes']}\n\n{markdown.table((words['parameter'], words['shape']), rows)}"


def lab(name: str, language: str) -> str:
    words = WORDS[language]
    rows = []
    for which in ("quick", "paper"):
        found = tables.run(which)
        task = found.tasks()[0]
        for encoding in found.encodings(task):
            if encoding.split(":")[0].split("+")[0] != name:
                continue
            far = max(task["test"])
            standing = verdict.standing(found, task, encoding, far)
            digits = 2 if which == "quick" else 3
            here, there = tables.cell(standing.here, digits), tables.cell(standing.far, digits)
            outcome = tables.outcome_in(language, standing.outcome)
            rows.append([f"`{encoding}`", f"{task['train']} → {far}", f"{here} → {there}", outcome])
    if not rows:
        return words["untested"]
    table = markdown.table(("", words["length"], words["loss"], words["outcome"]), rows)
    return f"{words['lab_intro']}\n\n{table}"


def speed(name: str, words: dict[str, str]) -> str:
    rows = []
    for file, device in (("results.json", "CPU, float32"), ("h200.json", "H200, bfloat16")):
        for workload in dict.fromkeys(r["workload"] for r in speed_tables.load(file)["records"]):
            base = re.sub(r"-(causal|values|decode|learned)", "", workload)
            if base != name:
                continue
            ratio = {
                kind: {w: r for r, w in tables.ratios(file, kind)}.get(workload) for kind in ("forward", "training")
            }
            if any(ratio.values()):
                cells = [f"{ratio[kind]:.2f} ×" if ratio[kind] else "–" for kind in ("forward", "training")]
                rows.append([device, f"`{workload}`", *cells])
    intro = words["speed_intro"]
    if not rows:
        intro, rows = words["speed_shorter"], speed_of_shorter_texts(name, words)
    if not rows:
        return words["unmeasured"]
    return f"{intro}\n\n{markdown.table((words['device'], '', words['forward'], words['training']), rows)}"


def speed_of_shorter_texts(name: str, words: dict[str, str]) -> list[list[str]]:
    """Its row of the table of all encodings, docs/encodings/speed.md."""
    for line in (DOCS / "encodings" / "speed.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" †") for cell in line.strip("|").split("|")]
        if cells[0] == f"`{name}`" and len(cells) == 9:
            _, cpu, *on_cpu, gpu, _, _, forward, training = cells
            return [
                [f"CPU, float32, 512 {words['tokens']}", f"`{cpu}`", *(f"{ratio} ×" for ratio in on_cpu)],
                [f"H200, bfloat16, 4 × 2048 {words['tokens']}", f"`{gpu}`", f"{forward} ×", f"{training} ×"],
            ]
    return []
