"""Extend RoPE: a model's configuration, a target length and a scaling; what it does, and the JSON to paste."""

from __future__ import annotations

import json
from html import escape
from typing import Any, NamedTuple

import gradio as gr
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

    head_dim: int  # head_dim, or hidden_size / num_attention_heads
    base: float  # rope_theta
    original: int  # max_position_embeddings, or original_max_position_embeddings where it is extended already
    long: tuple[float, ...] = ()  # rope_scaling's long_factor


# Each line gives the model's hidden_size / num_attention_heads, rope_theta and length, as commonly
# published for it; compare with your checkpoint's own config.json before you rely on them.
MODELS = {
    "Llama 2 7B": Model(128, 10000.0, 4096),  # meta-llama/Llama-2-7b-hf: 4096 / 32
    "Llama 3 8B": Model(128, 500000.0, 8192),  # meta-llama/Meta-Llama-3-8B: 4096 / 32
    "Mistral 7B v0.3": Model(128, 1000000.0, 32768),  # mistralai/Mistral-7B-v0.3: 4096 / 32
    "Qwen2.5 7B Instruct": Model(128, 1000000.0, 32768),  # Qwen/Qwen2.5-7B-Instruct: 3584 / 28
    "Phi-3 mini 4k": Model(96, 10000.0, 4096),  # microsoft/Phi-3-mini-4k-instruct: 3072 / 32
    "Phi-3 vision 128k": Model(  # microsoft/Phi-3-vision-128k-instruct: 3072 / 32; float32 there, two decimals say the same
        96, 10000.0, 4096,
        (1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58, 15.66,
         15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77, 59.92,
         61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81),
    ),
    "TinyLlama 1.1B": Model(64, 10000.0, 2048),  # TinyLlama/TinyLlama-1.1B-Chat-v1.0: 2048 / 32
}  # fmt: skip
SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "proportional")
LONGEST = 4_194_304


class Extend(Page):
    key = "extend"
    figures = 2
    defaults = {
        "head_dim": "128", "base": "10000", "original": "4096", "target": "16384", "scaling": "yarn", "factors": "",
    }  # fmt: skip

    def draw(self, state_: State, words: Words, *, coarse: bool = False) -> View:
        head_dim = state.number(state_, "head_dim", 4, 1024, words)
        if head_dim % 2:
            raise Sorry(words("odd head", head_dim=head_dim))
        base = state.real(state_, "base", 1.5, 1e12, words)
        original = state.number(state_, "original", 2, LONGEST, words)
        target = state.number(state_, "target", 2, LONGEST, words)
        kind = state.choice(state_, "scaling", SCALINGS, words)
        chosen, made = scaling_of(kind, head_dim, original, target, state_["factors"], words)
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
        d = self.defaults
        model = gr.Dropdown(
            [(words("own model"), ""), *((name, name) for name in MODELS)], value="Llama 2 7B", label=words("model"),
            elem_id="extend-model",
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
        said = gr.HTML("", elem_id="extend-said")

        def read(*values: Any) -> State:
            keys = ("head_dim", "base", "original", "target", "scaling", "factors")
            return {key: state.plain(value).strip() for key, value in zip(keys, values)}

        def write(wanted: State) -> list[Any]:
            whole = [int(float(wanted[key])) for key in ("original", "target")]
            return [
                int(float(wanted["head_dim"])), float(wanted["base"]), *whole, wanted["scaling"], wanted["factors"],
            ]  # fmt: skip

        def fill(name: str) -> list[Any]:
            """A model's numbers; one that was extended with LongRoPE brings its factors, length and scaling."""
            if name not in MODELS:
                return [gr.skip()] * 6
            chosen = MODELS[name]
            more = (131072, "longrope", ", ".join(map(str, chosen.long))) if chosen.long else (gr.skip(), gr.skip(), "")
            return [chosen.head_dim, chosen.base, chosen.original, *more]

        def paste(text: str) -> list[Any]:
            if not (text or "").strip():
                return [gr.skip()] * 4 + [""]
            try:
                found = from_json(text, words)
            except ValueError as error:
                sentence = str(error) if isinstance(error, Sorry) else words("library", error=error)
                return [gr.skip()] * 4 + [f'<p class="sentence" role="alert">{escape(sentence)}</p>']
            said = "" if found[0] else f'<p class="sentence" role="alert">{escape(words("config head"))}</p>'
            return [gr.skip() if value is None else value for value in found] + [said]

        return Controls(
            [head_dim, base, original, target, scaling, factors],
            read,
            write,
            first=[
                (model.input, fill, [model], [head_dim, base, original, target, scaling, factors]),
                (config.change, paste, [config], [head_dim, base, original, scaling, said]),
            ],
        )


def from_json(text: str, words: Words) -> tuple[int | None, float | None, int | None, str | None]:
    """(head size, base, trained length, kind of scaling) of a pasted config.json; None where it does not say."""
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
    return setup.head_dim, setup.base, original if isinstance(original, int) else None, kind


def scaling_of(
    kind: str, head_dim: int, original: int, target: int, factors: str, words: Words
) -> tuple[Scaling | None, str]:
    """A scaling to `target`, and how it is written by hand."""
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
    try:
        long = tuple(float(part) for part in factors.replace("[", " ").replace("]", " ").replace(",", " ").split())
    except ValueError:
        raise Sorry(words("factors wrong")) from None
    if len(long) != head_dim // 2:
        raise Sorry(words("factors needed", pairs=head_dim // 2, given=len(long)))
    short = (1.0,) * len(long)
    text = f"posenc.scaling.LongRoPE(short=({short[0]},) * {len(short)}, long={long}, original={original}, factor={factor!r})"
    return kinds.LongRoPE(short=short, long=long, original=original, factor=factor), text


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
