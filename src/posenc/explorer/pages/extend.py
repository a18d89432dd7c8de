"""Extend RoPE: the effect of a scaling on a model's wavelengths and phases, and the JSON for its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from html import escape
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

import posenc

from ...core.translation import Translation
from ...encodings import spec
from ...encodings.rope import scaling as kinds
from ...encodings.rope.scaling import Scaling
from ...plot import analysis, panels
from ...plot.panels import Heat, Panel, array
from .. import url_state
from ..url_state import InputError, State
from .base import Controls, Figure, Page, View
from .pasted_config import FORM, KINDS, SEPARATE, compact, compared, from_json, listed


class Model(NamedTuple):
    """The rotary settings of a model's config.json."""

    head_dim: int
    base: float
    original: int  # trained length, before any extension
    target: int  # extended length, or four times the trained one
    long: tuple[float, ...] = ()
    short: tuple[float, ...] = ()


def _models() -> dict[str, Model]:
    """models.json: entries of each model's config.json, and the published file they were checked against."""
    configs = json.loads(resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8"))
    found = {}
    for name, config in configs.items():
        length = config["max_position_embeddings"]
        original = config.get("original_max_position_embeddings", length)
        target = length if length > original else 4 * length
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        long, short = (tuple(config.get(key, ())) for key in ("long_factor", "short_factor"))
        found[name] = Model(head_dim, config["rope_theta"], original, target, long, short)
    return found


MODELS = _models()
SCALINGS = ("none", *KINDS)
KEYS = (*FORM, "config")
ROTATION = ("rotary_dim", "layout", "values")
"""Options of RoPE itself, in addition to those of its scaling."""
MAX_LENGTH = 4_194_304


class Extend(Page):
    key = "extend"
    figures = 2
    defaults = {
        "head_dim": "128", "base": "10000", "original": "4096", "target": "16384", "scaling": "yarn", "options": "",
        "factors": "", "short": "", "config": "",
    }  # fmt: skip

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        blank = [key for key in KEYS[:4] if not state[key].strip()]
        if blank:
            if state["config"]:
                from_json(state["config"], words, clear=True)
            names = words("comma").join(url_state.label(key, words) for key in blank)
            raise InputError(words("form empty", names=names), clear=True)
        head_dim = url_state.read_int(state, "head_dim", 4, 1024, words)
        if head_dim % 2:
            raise InputError(words("odd head", head_dim=head_dim))
        base = url_state.read_float(state, "base", 1.5, 1e12, words)
        original = url_state.read_int(state, "original", 2, MAX_LENGTH, words)
        target = url_state.read_int(state, "target", 2, MAX_LENGTH, words)
        kind = url_state.read_choice(state, "scaling", SCALINGS, words)
        options = options_of(state["options"], kind, words)
        rotation = {name: options.pop(name) for name in ROTATION if name in options}
        size = _rotary_dim(rotation, head_dim, words)
        factors = state["factors"], state["short"]
        chosen, made = scaling_of(kind, size, original, target, factors, options, words)
        rope = posenc.RoPE(head_dim=head_dim, base=base, scaling=chosen, **rotation)
        label = words(f"scaling {kind}")
        compared: dict[str, Scaling | None] = {"RoPE": None}
        if chosen is not None:
            compared[label] = chosen
        (waves,) = panels.wavelengths(size, base, compared, original=original, target=target, words=words)
        positions = analysis.sample_positions(target, 192)
        phases: list[Panel] = []
        for name, some in compared.items():
            untrained = array(analysis.untrained_phases(size, base, some, original, positions, target))
            title = words("phases", name=name, share=f"{untrained.any(1).mean():.0%}")
            axes = words("position"), words("pair"), words("untrained")
            x, y, z = array(positions), np.arange(size // 2), untrained.astype(np.float32)
            phases.append(Heat(title, x, y, z, *axes, (0.0, 1.0), diverging=False))
        notes = []
        if target <= original and "factor" not in options:
            notes.append(words("no extension", target=target, original=original))
        return View(
            [Figure([waves], columns=1, height=420), Figure(phases, columns=2, height=400)],
            code=_code(made, {"head_dim": head_dim, "base": base, **rotation}, target),
            html=_configuration(rope, original, target, state["config"], words),
            notes=notes,
        )

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        d = self.defaults
        models = [(words("own model"), ""), *((name, name) for name in MODELS)]
        model = self.component(gr.Dropdown, "model", words, models, value="Llama 2 7B", info=words("model why"))
        example = '{"head_dim": 128, "rope_theta": 10000.0, …}'
        text = {"label": words("paste config"), "lines": 2, "max_lines": 6, "placeholder": example}
        config = self.component(gr.Textbox, "config", words, **text)
        head_dim = self.component(gr.Number, "head_dim", words, int(d["head_dim"]), precision=0)
        base = self.component(gr.Number, "base", words, float(d["base"]))
        original = self.component(gr.Number, "original", words, int(d["original"]), precision=0)
        target = self.component(gr.Number, "target", words, int(d["target"]), precision=0)
        scalings = [(words(f"scaling {kind}"), kind) for kind in SCALINGS]
        scaling = self.component(gr.Dropdown, "scaling", words, scalings, value=d["scaling"])
        options, factors, short = (
            self.component(gr.Textbox, key, words, label=words(name), info=words(f"{name} why"), lines=1, max_lines=3)
            for key, name in (("options", "rotation options"), ("factors", "factors"), ("short", "short factors"))
        )
        message = gr.HTML("", elem_id="extend-message")
        form = [head_dim, base, original, target, scaling, options, factors, short]
        components = [*form, config, model]

        def read(*values: Any) -> State:
            state = {key: url_state.to_text(value).strip() for key, value in zip(KEYS, values)}
            return {**state, "config": compact(state["config"])}

        def write(wanted: State) -> list[Any]:
            whole = {key: int(float(wanted[key])) for key in ("head_dim", "original", "target") if wanted[key]}
            exact = {"base": float(wanted["base"]) if wanted["base"] else None}
            filled = {**wanted, **dict.fromkeys(KEYS[:4]), **whole, **exact}
            known = model_of(filled["head_dim"], filled["base"], filled["original"], wanted["factors"])
            return [*(filled[key] for key in KEYS), "" if wanted["config"] else known]

        def fill(name: str, wanted: float | None, kind: str) -> list[Any]:
            """Fill in a model's settings; a LongRoPE model also sets the factors, the length and the scaling."""
            if name not in MODELS:
                return [gr.skip()] * (len(form) + 2)
            chosen = MODELS[name]
            if chosen.long:
                length, kind = chosen.target, "longrope"
            else:
                length = int(wanted) if wanted and wanted > chosen.original else chosen.target
                kind = "yarn" if kind == "longrope" else kind  # the factors were those of another model
            return [*chosen[:3], length, kind, "", listed(chosen.long), listed(chosen.short), "", ""]

        def paste(text: str | None) -> list[Any]:
            """Replace the whole form by the settings of a pasted configuration; None is one that came with a link, which
            has filled in the form too.
            """
            if text is None:
                return [gr.skip()] * (len(form) + 2)
            if not text.strip():
                return [gr.skip()] * (len(form) + 1) + [""]
            try:
                found = from_json(text, words)
            except ValueError as error:
                sentence = str(error) if isinstance(error, InputError) else words("library", error=error)
                return ["", *CLEARED, f'<p class="input-error" role="alert">{escape(sentence)}</p>']
            missing = [words(f"config {name}") for name, value in
                       (("head", found.head_dim), ("length", found.original)) if value is None]  # fmt: skip
            taken = words("config taken", given=found.summary(words))
            alerts = "".join(f'<p class="input-error" role="alert">{escape(sentence)}</p>' for sentence in missing)
            known = model_of(found.head_dim, found.base, found.original, found.factors)
            known = known if found.scaling in ("none", "longrope") else ""  # an extended model is another one
            return [known, *found, f'{alerts}<p class="note">{escape(taken)}</p>']

        def retarget(text: str) -> str:
            """A new length from the user: the factor follows from it again."""
            return _without(text, {"factor"})

        def rescale(text: str) -> str:
            """A new scaling from the user: drop the options of the previous one."""
            return _without(text, {field.name for kind in KINDS.values() for field in fields(kind)})

        of_link = "text => [posenc.isOfLink('extend', text) ? null : text]"
        handlers: list[tuple[Any, ...]] = [
            (model.input, fill, [model, target, scaling], [*form, config, message]),
            (config.change, paste, [config], [model, *form, message], of_link),
            *(
                (box.input, model_of, [head_dim, base, original, factors], [model])
                for box in (head_dim, base, original)
            ),
            (target.input, retarget, [options], [options]),
            (original.input, retarget, [options], [options]),
            (scaling.input, rescale, [options], [options]),
        ]
        return Controls(components, read, write, handlers, quiet={model, config})


CLEARED = (None, None, None, None, "none", "", "", "")


def model_of(head_dim: Any, base: Any, original: Any, factors: str = "") -> str:
    """The known model with these settings; empty if there is none."""
    for name, model in MODELS.items():
        if (head_dim, base, original) == model[:3] and (not model.long or factors == listed(model.long)):
            return name
    return ""


def options_of(text: str, kind: str, words: Translation) -> dict[str, Any]:
    """Parse the options line of the form: options of the scaling and of the rotation."""
    own = [each.name for each in fields(KINDS[kind]) if each.name not in SEPARATE] if kind in KINDS else []
    found: dict[str, Any] = {}

    def wrong(given: str, allowed: str) -> InputError:
        return InputError(words("rotation option wrong", given=given.strip()[:40], scaling=kind, allowed=allowed))

    for part in text.split(",") if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in (*own, *ROTATION) or not equals or not value:
            raise wrong(part, words("comma").join((*own, *ROTATION)))
        found[name] = spec.value(value)
        if isinstance(found[name], str) != (name in ("layout", "ramp")):
            raise wrong(part, name)
    if not isinstance(found.get("values", False), bool):
        raise wrong("values", "values=true")
    return found


def _without(text: str, names: set[str]) -> str:
    """An options line without these names."""
    return ",".join(part for part in (text or "").split(",") if part.partition("=")[0].strip() not in names)


def _rotary_dim(rotation: Mapping[str, Any], head_dim: int, words: Translation) -> int:
    """The number of rotated channels."""
    text = {"rotary_dim": str(rotation.get("rotary_dim", head_dim))}
    size = url_state.read_int(text, "rotary_dim", 2, head_dim, words)
    if size % 2:
        raise InputError(words("odd head", head_dim=size))
    return size


def scaling_of(
    kind: str, size: int, original: int, target: int, factors: tuple[str, str], options: Mapping[str, Any], words: Translation
) -> tuple[Scaling | None, str]:  # fmt: skip
    """(a scaling of `size` channels to `target`, its source text). `factors` are LongRoPE's long and short ones;
    `options` override what follows from the lengths.
    """
    if kind == "none":
        return None, "None"
    factor = max(1.0, target / original)
    given: dict[str, Any] = {
        "linear": {"factor": factor}, "ntk": {"factor": factor}, "dynamic": {"factor": 1.0, "original": original},
        "proportional": {"fraction": 0.75},
    }.get(kind, {"factor": factor, "original": original})  # fmt: skip
    if kind == "longrope":
        long, short = (_factors(text, size // 2, words) for text in factors)
        if not long:
            raise InputError(words("factors needed", pairs=size // 2, given=0))
        given = {"short": short or (1.0,) * len(long), "long": long, **given}
    given |= options
    try:
        made = KINDS[kind](**given)
    except OverflowError as error:
        raise InputError(words("library", error=error)) from None
    literals = {name: f"({value[0]},) * {len(value)}" if name == "short" and len(set(value)) == 1 else repr(value)
            for name, value in given.items()}  # fmt: skip
    arguments = ", ".join(f"{name}={value}" for name, value in literals.items())
    return made, f"posenc.scaling.{type(made).__name__}({arguments})"


def _factors(text: str, pairs: int, words: Translation) -> tuple[float, ...]:
    """One number per pair, or none."""
    try:
        found = tuple(float(part) for part in text.replace("[", " ").replace("]", " ").replace(",", " ").split())
    except ValueError:
        raise InputError(words("factors wrong")) from None
    if found and len(found) != pairs:
        raise InputError(words("factors needed", pairs=pairs, given=len(found)))
    return found


def _configuration(rope, original: int, target: int, pasted: str, words: Translation) -> str:
    """The attention factor, the JSON to merge into config.json, and its differences from the pasted one."""
    factor = rope.attention_factor
    try:
        config = kinds.to_config(rope)
        config.setdefault("max_position_embeddings", max(original, target))
        block = f"<pre tabindex='0' id='extend-json'><code>{escape(json.dumps(config, indent=2))}</code></pre>"
        block += compared(pasted, config, words)
    except ValueError as error:
        block = f"<p>{escape(str(error))}</p>"
    return (
        f"<p>{escape(words('attention factor', factor=f'{factor:.4f}', square=f'{factor**2:.4f}'))}</p>"
        f"<h2>{escape(words('json'))}</h2>{block}"
    )


def _code(written: str, rope: Mapping[str, Any], target: int) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in rope.items())
    lines = [
        "import math, posenc",
        f"scaling = {written}",
        f"rope = posenc.RoPE({arguments}, scaling=scaling)",
        f"wavelengths = [math.tau / w if w else math.inf for w in rope.frequencies({target})]",
        "config = posenc.scaling.to_config(rope)  # merge into config.json",
    ]
    return "\n".join(lines)
