"""Extend RoPE: a model's configuration, a target length and a scaling; what it does, and the JSON to paste."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

import posenc

from .. import scaling as kinds
from ..plot import numbers, panels
from ..plot.panels import Heat, Panel, array
from ..plot.words import Words
from ..scaling import Scaling
from . import state
from .state import Sorry, State
from .view import Controls, Figure, Page, View


class Model(NamedTuple):
    """What a model's config.json says of its positions."""

    head_dim: int
    base: float
    original: int  # the length that it was trained on, before it was extended
    target: int  # the length that it has, or four times the trained one where it was not extended
    long: tuple[float, ...] = ()
    short: tuple[float, ...] = ()


def _models() -> dict[str, Model]:
    """models.json: words of each model's config.json, and the published file that each was compared with."""
    told = json.loads(resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8"))
    found = {}
    for name, config in told.items():
        length = config["max_position_embeddings"]
        original = config.get("original_max_position_embeddings", length)
        found[name] = Model(
            config["hidden_size"] // config["num_attention_heads"], config["rope_theta"], original,
            length if length > original else 4 * length, tuple(config.get("long_factor", ())),
            tuple(config.get("short_factor", ())),
        )  # fmt: skip
    return found


MODELS = _models()
SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "proportional")
LONGEST = 4_194_304


class Extend(Page):
    key = "extend"
    figures = 2
    defaults = {
        "head_dim": "128", "base": "10000", "original": "4096", "target": "16384", "scaling": "yarn", "factors": "",
        "short": "",
    }  # fmt: skip

    def draw(self, state_: State, words: Words, *, coarse: bool = False) -> View:
        head_dim = state.number(state_, "head_dim", 4, 1024, words)
        if head_dim % 2:
            raise Sorry(words("odd head", head_dim=head_dim))
        base = state.real(state_, "base", 1.5, 1e12, words)
        original = state.number(state_, "original", 2, LONGEST, words)
        target = state.number(state_, "target", 2, LONGEST, words)
        kind = state.choice(state_, "scaling", SCALINGS, words)
        chosen, made = scaling_of(kind, head_dim, original, target, (state_["factors"], state_["short"]), words)
        rope = posenc.RoPE(head_dim=head_dim, base=base, scaling=chosen)
        label = words(f"scaling {kind}")
        compared: dict[str, Scaling | None] = {"RoPE": None}
        if chosen is not None:
            compared[label] = chosen
        (waves,) = panels.wavelengths(head_dim, base, compared, original=original, target=target, words=words)
        place = numbers.positions(target, 192)
        phases: list[Panel] = []
        unseen = {}
        for name, some in compared.items():
            seen = numbers.unseen_phases(head_dim, base, some, original, place, target)
            unseen[name] = float(seen.any(1).sum()) / len(seen)
            phases.append(
                Heat(
                    words("phases", name=name, share=f"{unseen[name]:.0%}"), array(place), np.arange(head_dim // 2),
                    array(seen).astype(np.float32), words("position"), words("pair"), words("unseen"), (0.0, 1.0),
                    diverging=False,
                )
            )  # fmt: skip
        notes = []
        if target <= original:
            notes.append(words("no extension", target=target, original=original))
        return View(
            [Figure([waves], columns=1, height=420), Figure(phases, columns=2, height=400)],
            code=_code(made, head_dim, base, target),
            html=_configuration(rope, original, target, words),
            notes=notes,
        )

    def controls(self, words: Words) -> Controls:
        import gradio as gr

        d = self.defaults
        model = gr.Dropdown(
            [(words("own model"), ""), *((name, name) for name in MODELS)], value="Llama 2 7B", label=words("model"),
            info=words("model why"), elem_id="extend-model",
        )  # fmt: skip
        config = gr.Textbox(
            label=words("paste config"), lines=2, max_lines=6, placeholder='{"head_dim": 128, "rope_theta": 10000.0, …}',
            elem_id="extend-config",
        )  # fmt: skip
        head_dim = gr.Number(int(d["head_dim"]), label=words("head size"), precision=0, elem_id="extend-head_dim")
        base = gr.Number(float(d["base"]), label=words("base"), elem_id="extend-base")
        original = gr.Number(int(d["original"]), label=words("original"), precision=0, elem_id="extend-original")
        target = gr.Number(int(d["target"]), label=words("target"), precision=0, elem_id="extend-target")
        scaling = gr.Dropdown(
            [(words(f"scaling {kind}"), kind) for kind in SCALINGS], value=d["scaling"], label=words("scaling"),
            elem_id="extend-scaling",
        )  # fmt: skip
        factors = gr.Textbox(
            label=words("factors"), info=words("factors why"), lines=1, max_lines=3, elem_id="extend-factors"
        )
        short = gr.Textbox(
            label=words("short factors"), info=words("short factors why"), lines=1, max_lines=3, elem_id="extend-short"
        )
        said = gr.HTML("", elem_id="extend-said")
        components = [head_dim, base, original, target, scaling, factors, short]

        def read(*values: Any) -> State:
            keys = ("head_dim", "base", "original", "target", "scaling", "factors", "short")
            return {key: state.plain(value).strip() for key, value in zip(keys, values)}

        def write(wanted: State) -> list[Any]:
            whole = [int(float(wanted[key])) for key in ("original", "target")]
            return [
                int(float(wanted["head_dim"])), float(wanted["base"]), *whole, wanted["scaling"], wanted["factors"],
                wanted["short"],
            ]  # fmt: skip

        def fill(name: str, wanted: float | None, kind: str) -> list[Any]:
            """A model's numbers; one that was extended with LongRoPE brings its factors, length and scaling."""
            if name not in MODELS:
                return [gr.skip()] * 7
            chosen = MODELS[name]
            if chosen.long:
                length, kind = chosen.target, "longrope"
            else:
                length = int(wanted) if wanted and wanted > chosen.original else chosen.target
                kind = "yarn" if kind == "longrope" else kind  # those factors were another model's
            return [
                chosen.head_dim,
                chosen.base,
                chosen.original,
                length,
                kind,
                _text(chosen.long),
                _text(chosen.short),
            ]

        def paste(text: str) -> list[Any]:
            if not (text or "").strip():
                return [gr.skip()] * 6 + [""]
            try:
                found = from_json(text, words)
            except ValueError as error:
                sentence = str(error) if isinstance(error, Sorry) else words("library", error=error)
                return [gr.skip()] * 6 + [f'<p class="sentence" role="alert">{escape(sentence)}</p>']
            said = "" if found.head_dim else f'<p class="sentence" role="alert">{escape(words("config head"))}</p>'
            return [gr.skip() if value is None else value for value in found] + [said]

        return Controls(
            components,
            read,
            write,
            first=[
                (model.input, fill, [model, target, scaling], components),
                (config.change, paste, [config], [head_dim, base, original, scaling, factors, short, said]),
            ],
        )


class Pasted(NamedTuple):
    """What a pasted config.json says; None where it does not."""

    head_dim: int | None
    base: float | None
    original: int | None
    scaling: str
    factors: str
    short: str


def from_json(text: str, words: Words) -> Pasted:
    """Read a pasted config.json."""
    if len(text) > 100_000:
        raise Sorry(words("config long", length=len(text)))
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise Sorry(words("not json", error=error.msg, line=error.lineno, column=error.colno)) from None
    except RecursionError:
        raise Sorry(words("not config")) from None
    if not isinstance(config, dict):
        raise Sorry(words("not config"))
    from ..dialects import read

    try:
        setup = read(config)
    except (
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
    ):  # numbers where it has names, names where it has numbers
        raise Sorry(words("not config")) from None
    if not (setup.head_dim is None or 4 <= setup.head_dim <= 1024) or not 1 < (setup.base or 10000.0) < 1e12:
        raise Sorry(words("not config"))
    kind = {
        kinds.Linear: "linear", kinds.NTK: "ntk", kinds.DynamicNTK: "dynamic", kinds.YaRN: "yarn",
        kinds.Llama3: "llama3", kinds.LongRoPE: "longrope", kinds.Proportional: "proportional",
    }.get(type(setup.scaling), "none")  # fmt: skip
    original = getattr(setup.scaling, "original", None) or config.get("max_position_embeddings")
    long, short = (_text(getattr(setup.scaling, name, ())) for name in ("long", "short"))
    return Pasted(setup.head_dim, setup.base, original if isinstance(original, int) else None, kind, long, short)


def _text(factors: tuple[float, ...]) -> str:
    return ", ".join(map(str, factors))


def scaling_of(
    kind: str, head_dim: int, original: int, target: int, factors: tuple[str, str], words: Words
) -> tuple[Scaling | None, str]:
    """A scaling to `target`, and how it is written by hand. `factors` are LongRoPE's, long and short."""
    factor = max(1.0, target / original)
    written = {
        "none": "None",
        "linear": f"posenc.scaling.Linear(factor={factor!r})",
        "ntk": f"posenc.scaling.NTK(factor={factor!r})",
        "dynamic": f"posenc.scaling.DynamicNTK(factor=1.0, original={original})",
        "yarn": f"posenc.scaling.YaRN(factor={factor!r}, original={original})",
        "llama3": f"posenc.scaling.Llama3(factor={factor!r}, original={original})",
        "proportional": "posenc.scaling.Proportional(fraction=0.75)",
    }
    made: dict[str, Any] = {
        "none": lambda: None,
        "linear": lambda: kinds.Linear(factor=factor),
        "ntk": lambda: kinds.NTK(factor=factor),
        "dynamic": lambda: kinds.DynamicNTK(factor=1.0, original=original),
        "yarn": lambda: kinds.YaRN(factor=factor, original=original),
        "llama3": lambda: kinds.Llama3(factor=factor, original=original),
        "proportional": lambda: kinds.Proportional(fraction=0.75),
    }
    if kind != "longrope":
        return made[kind](), written[kind]
    long, short = (_factors(text, head_dim // 2, words) for text in factors)
    if not long:
        raise Sorry(words("factors needed", pairs=head_dim // 2, given=0))
    told = f"({short[0]},) * {len(long)}" if len(set(short)) == 1 else str(short)
    if not short:
        short, told = (1.0,) * len(long), f"(1.0,) * {len(long)}"
    text = f"posenc.scaling.LongRoPE(short={told}, long={long}, original={original}, factor={factor!r})"
    return kinds.LongRoPE(short=short, long=long, original=original, factor=factor), text


def _factors(text: str, pairs: int, words: Words) -> tuple[float, ...]:
    """One number for each pair, or none at all."""
    try:
        found = tuple(float(part) for part in text.replace("[", " ").replace("]", " ").replace(",", " ").split())
    except ValueError:
        raise Sorry(words("factors wrong")) from None
    if found and len(found) != pairs:
        raise Sorry(words("factors needed", pairs=pairs, given=len(found)))
    return found


def _configuration(rope, original: int, target: int, words: Words) -> str:
    """The attention factor, and what to merge into config.json."""
    factor = rope.attention_factor
    try:
        config = kinds.to_config(rope)
        config.setdefault("max_position_embeddings", max(original, target))
        told = f"<pre tabindex='0' id='extend-json'><code>{escape(json.dumps(config, indent=2))}</code></pre>"
    except ValueError as error:
        told = f"<p>{escape(str(error))}</p>"
    return (
        f"<p>{escape(words('attention factor', factor=f'{factor:.4f}', square=f'{factor**2:.4f}'))}</p>"
        f"<h3>{escape(words('json'))}</h3>{told}"
    )


def _code(written: str, head_dim: int, base: float, target: int) -> str:
    return "\n".join(
        [
            "import math, posenc",
            f"scaling = {written}",
            f"rope = posenc.RoPE(head_dim={head_dim}, base={base!r}, scaling=scaling)",
            f"wavelengths = [math.tau / w if w else math.inf for w in rope.frequencies({target})]",
            "config = posenc.scaling.to_config(rope)  # merge into config.json",
        ]
    )
