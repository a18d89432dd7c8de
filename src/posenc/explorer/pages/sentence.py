"""Your sentence: its attention pattern under each encoding, the terms of the scores, and the effect of swaps and shifts."""

from __future__ import annotations

import inspect
import unicodedata
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import posenc

from ...core.html_tags import join, tag
from ...core.positions import Positions
from ...core.translation import Translation
from ...encodings.registry import info, list_encodings
from ...nn.attention import Attention
from ...plot import panels, trained
from ...plot.analysis import DRAWN_OPTIONS, FORMULAS, TERMS
from ...plot.panels import Heat, Panel, array
from .. import url_state
from ..cancellation import checkpoint
from ..texts import TEXTS
from ..url_state import InputError, State
from .base import Controls, Figure, Page, View

D_MODEL, HEADS = 64, 4
MAX_CHARACTERS, MAX_TOKENS = 2000, 48
"""Longest accepted text, and the number of its tokens that are drawn."""
CHANGES = ("swap", "shift")


class Sentence(Page):
    key = "sentence"
    figures = 3
    defaults = {
        "text": TEXTS["sample text"][0], "encoding": "t5", "head": "0", "causal": "false",
        "strength": "0.5", "change": "swap", "first": "1", "second": "5", "shift": "100",
    }  # fmt: skip

    def defaults_in(self, words: Translation) -> dict[str, str]:
        return {**self.defaults, "text": words("sample text")}

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        text = state["text"]
        if len(text) > MAX_CHARACTERS:
            raise InputError(words("text long", length=len(text), most=MAX_CHARACTERS), clear=True)
        tokens = split(text)
        if not tokens:
            raise InputError(words("text empty"), clear=True)
        notes = [words("tokens cut", most=MAX_TOKENS, number=len(tokens))] if len(tokens) > MAX_TOKENS else []
        tokens = tokens[:MAX_TOKENS]
        name = url_state.read_choice(state, "encoding", list_encodings(), words)
        head = url_state.read_int(state, "head", 0, HEADS - 1, words)
        causal = url_state.read_choice(state, "causal", ("true", "false"), words) == "true"
        strength = url_state.read_float(state, "strength", 0.0, 2.0, words)
        change = url_state.read_choice(state, "change", CHANGES, words)
        attention_of: dict[str, Tensor] = {}
        for other in list_encodings():
            checkpoint()
            try:
                weights = _pattern(other, strength if has_tables(other) else 0.0, tuple(tokens), causal)[head]
            except ValueError:
                continue  # encodings with several axes: a sentence has one
            attention_of[other] = weights
        # the colour scale ends at the median of the maxima, so that one sharp pattern does not darken all others
        bright = float(np.median([weights.max().item() for weights in attention_of.values()]))
        patterns = [
            _heat(_title(other), weights, tokens, words, bright, labelled=False)
            for other, weights in attention_of.items()
        ]
        chosen = layer(name, strength)
        drawn = panels.decomposition(chosen, vectors(tokens), head=head, labels=tokens, words=words)
        titles = {panel.title for panel in drawn}
        absent = [words(term) for term in TERMS if words("absent", term=words(term)) in titles]
        terms = [panel for panel in drawn if isinstance(panel, Heat) and panel.z.any()]
        if change == "swap":
            wanted = [url_state.read_int(state, key, 0, MAX_CHARACTERS, words) for key in ("first", "second")]
            pair = [min(number, len(tokens) - 1) for number in wanted]
            if pair != wanted and len(tokens) > 1:
                if pair[0] == pair[1]:  # both were past the end
                    pair[0] -= 1
                notes.append(words("clamped", last=len(tokens) - 1, first=pair[0], second=pair[1]))
            changed, note = _swap(chosen, tokens, head, causal, pair, name, words)
        else:
            shift = url_state.read_int(state, "shift", 0, 1_000_000, words)
            changed, note = _shift(chosen, tokens, head, causal, shift, name, words)
        notes.append(note)
        if absent:
            notes.append(words("terms absent", name=name, terms=words("comma").join(absent)))
        listed = [tag("li", tag("bdi", token), value=n) for n, token in enumerate(tokens)]
        return View(
            [
                Figure(patterns, columns=6, height=190, mosaic=True),
                Figure(terms, columns=3, height=380),
                Figure(changed, columns=3, height=400),
            ],
            code=_code(tokens, name, strength, causal),
            html=join([
                tag("p", words("random tables")), tag("h2", words("tokens")), tag("p", words("tokens how")),
                tag("ol", *listed, class_="tokens", start=0),
            ]),
            notes=notes,
        )  # fmt: skip

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        d = self.defaults
        kinds: dict[str, tuple[Any, tuple, dict[str, Any], Any]] = {
            "text": (gr.Textbox, (words("sample text"),), {"lines": 2, "max_lines": 4}, str),
            "encoding": (gr.Dropdown, (list(list_encodings()),), {"value": d["encoding"]}, str),
            "head": (gr.Slider, (0, HEADS - 1, 0), {"step": 1}, int),
            "strength": (gr.Slider, (0.0, 2.0, 0.5), {"step": 0.05, "info": words("strength why")}, float),
            "causal": (gr.Checkbox, (False,), {}, "true".__eq__),
            "change": (gr.Radio, ([(words(c), c) for c in CHANGES],), {"value": d["change"]}, str),
            "first": (gr.Number, (int(d["first"]),), {"precision": 0, "minimum": 0}, int),
            "second": (gr.Number, (int(d["second"]),), {"precision": 0, "minimum": 0}, int),
            "shift": (gr.Slider, (0, 1000, int(d["shift"])), {"step": 1}, int),
        }
        """By parameter: its component, what that is made with, and the type of its value."""
        components = [
            self.component(kind, key, words, *values, **more) for key, (kind, values, more, _) in kinds.items()
        ]

        def read(*values: Any) -> State:
            return dict(zip(kinds, map(url_state.to_text, values)))

        def write(wanted: State) -> list[Any]:
            return [convert(wanted[key]) for key, (*_, convert) in kinds.items()]

        return Controls(components, read, write)


def split(text: str) -> list[str]:
    """Tokens: runs of letters, digits and their accents; single Chinese characters; runs of other signs (an emoji with
    its modifiers).
    """
    tokens: list[str] = []
    before = " "
    for character in text:
        category = unicodedata.category(character)
        if category.startswith(("Z", "C")) and character != "\u200d":
            before = " "
            continue
        alone = _ideograph(character)
        kind = "letter" if category[0] in "LNM" and not alone else "sign"
        joined = (kind == before and not alone) or (before != " " and (category[0] == "M" or character == "\u200d"))
        if joined and tokens:
            tokens[-1] += character
        else:
            tokens.append(character)
        before = "alone" if alone else before if joined else kind
    return tokens


def _ideograph(character: str) -> bool:
    blocks = (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)
    return any(first <= ord(character) <= last for first, last in blocks)


def vectors(tokens: list[str]) -> Tensor:
    """A random vector per token that depends on its text only: [1, L, D_MODEL]."""
    seeds = [zlib.crc32(token.encode("utf-8", "replace")) for token in tokens]
    return torch.stack([torch.randn(D_MODEL, generator=torch.Generator().manual_seed(seed)) for seed in seeds])[None]


def is_trained(name: str) -> bool:
    """Whether the layer has a trained table: of biases, which mean the same with any queries."""
    return trained.fits(name, {}) and trained.queries(name) is None


@lru_cache(maxsize=64)
def has_tables(name: str) -> bool:
    """Whether an encoding has random tables, whose standard deviation is the strength."""
    return "std" in inspect.signature(info(name).load().__init__).parameters and not is_trained(name)


def settings(name: str, strength: float) -> dict[str, Any]:
    """Options that make untrained tables large enough to be visible."""
    drawn = {key: value for key, value in DRAWN_OPTIONS.get(name, {}).items() if key != "std"}
    return drawn | ({"std": strength} if has_tables(name) and strength > 0 else {})


@lru_cache(maxsize=64)
def layer(name: str, strength: float) -> Attention:
    """An untrained layer in which a token attends to equal tokens: keys and queries share their weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = posenc.create(name, d_model=D_MODEL, heads=HEADS, **settings(name, strength))
        if is_trained(name):
            trained.fill(name, encoding)
        made = Attention(D_MODEL, HEADS, encoding=encoding, causal=encoding.causal_only)
    made.k_proj.weight = made.q_proj.weight
    return made


@torch.no_grad()
def attention(made: Attention, x: Tensor, *, causal: bool, start: int = 0) -> Tensor:
    """Attention probabilities [heads, L, L] of a layer for x, with positions from `start`."""
    positions = Positions((start, x.shape[1]))
    x = made.encoding.embed(x, positions)
    q, k = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (made.q_proj, made.k_proj))
    return posenc.scores(q, k, made.encoding.plan(positions, x=x, host=made), causal=causal).softmax(-1)[0]


@lru_cache(maxsize=128)
def _pattern(name: str, strength: float, tokens: tuple[str, ...], causal: bool) -> Tensor:
    """Attention under an encoding; cached, because most patterns do not depend on the slider that moves."""
    return attention(layer(name, strength), vectors(list(tokens)), causal=causal)


@lru_cache(maxsize=64)
def _title(name: str) -> str:
    """The name of an encoding; a star marks random tables."""
    random = any(True for _ in layer(name, 0.5).encoding.parameters()) and not is_trained(name) and name not in FORMULAS
    return f"{name}\u00a0*" if random else name


def _heat(
    title: str, weights: Tensor, tokens: list[str], words: Translation, bright: float, labelled: bool = True
) -> Heat:
    index = np.arange(len(tokens))
    return Heat(
        title, index, index, array(weights), words("key word"), words("query word"), words("weight"), (0.0, bright),
        diverging=False, labels=(tokens, tokens) if labelled else None,
    )  # fmt: skip


def _change(
    before: Tensor, after: Tensor, tokens: list[str], titles: tuple[str, str, str], words: Translation
) -> list[Panel]:
    difference = after - before
    most = max(float(difference.abs().max()), 1e-3)
    bright = max(float(before.max()), float(after.max()))
    return [
        _heat(titles[0], before, tokens, words, bright),
        _heat(titles[1], after, tokens, words, bright),
        replace(
            _heat(titles[2], difference, tokens, words, most), unit=words("difference"), limits=(-most, most), diverging=True,
        ),
    ]  # fmt: skip


def _swap(made, tokens, head, causal, pair, name, words) -> tuple[list[Panel], str]:
    """Swap two tokens; the new pattern is put back into the old order, so that only the effect of position remains."""
    order = list(range(len(tokens)))
    order[pair[0]], order[pair[1]] = order[pair[1]], order[pair[0]]
    before = attention(made, vectors(tokens), causal=causal)[head]
    after = attention(made, vectors([tokens[i] for i in order]), causal=causal)[head][order][:, order]
    most = float((after - before).abs().max())
    key = "swap one" if len(tokens) == 1 else "swap nothing" if most < 1e-5 else "swap something"
    note = words(key, name=name, one=tokens[pair[0]], other=tokens[pair[1]], most=f"{most:.3f}")
    titles = words("before"), words("after swap"), words("difference swap")
    return _change(before, after, tokens, titles, words), note


def _shift(made, tokens, head, causal, shift, name, words) -> tuple[list[Panel], str]:
    """The same tokens, `shift` positions later."""
    before, after = (attention(made, vectors(tokens), causal=causal, start=start)[head] for start in (0, shift))
    most = float((after - before).abs().max())
    note = words("shift nothing" if most < 1e-4 else "shift something", name=name, shift=shift, most=f"{most:.3f}")
    titles = words("before"), words("after shift", shift=shift), words("difference shift")
    return _change(before, after, tokens, titles, words), note


def _code(tokens: list[str], name: str, strength: float, causal: bool) -> str:
    options = "".join(f", {key}={value!r}" for key, value in settings(name, strength).items())
    past = ", causal=True" if info(name).load().causal_only else ""
    hidden = ", causal=True" if causal else ""
    lines = [
        "import torch, zlib, posenc" + (", posenc.plot.trained" if is_trained(name) else ""),
        f"words = {tokens!r}",
        "seeds = [torch.Generator().manual_seed(zlib.crc32(w.encode('utf-8', 'replace'))) for w in words]",
        f"x = torch.stack([torch.randn({D_MODEL}, generator=seed) for seed in seeds])[None]",
        "torch.manual_seed(0)",
        f"encoding = posenc.create({name!r}, d_model={D_MODEL}, heads={HEADS}{options})",
        *([f"posenc.plot.trained.fill({name!r}, encoding)"] if is_trained(name) else []),
        f"layer, positions = posenc.Attention({D_MODEL}, {HEADS}, encoding=encoding{past}), posenc.Positions({len(tokens)})",
        "layer.k_proj.weight = layer.q_proj.weight  # a token attends to equal tokens",
        "x = encoding.embed(x, positions)",
        f"q, k = (p(x).unflatten(-1, ({HEADS}, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))",
        f"scores = posenc.scores(q, k, encoding.plan(positions, x=x, host=layer){hidden})",
        "attention = scores.softmax(-1)[0]",
    ]
    return "\n".join(lines)
