"""Compare: up to three encodings at one length, with controls for their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.html_tags import Markup, join, tag
from ...core.plan import Plan
from ...core.positions import Positions
from ...core.translation import Translation
from ...encodings import spec
from ...encodings.registry import list_encodings
from ...plot import analysis, panels
from ...plot.analysis import Subject
from ...plot.panels import Array, Heat, Lines, Panel, array
from .. import url_state
from ..cancellation import checkpoint
from ..url_state import InputError, State
from . import snippets
from .base import Controls, Figure, Page, View, facts_table
from .option_controls import FURTHEST, Option, options_of, validate
from .table_origin import axes_notes, trained_notes, untrained_notes

SLOTS = ("a", "b", "c")
MAX_LENGTH = 65536
COARSE, FINE, EASY = 64, 192, 512
"""Positions per side of a heat map in the coarse and in the fine drawing. Up to EASY tokens there is no coarse drawing,
and the export holds every position.
"""
LOWEST_SCORE = -24.0
"""Lower end of the score axes: e^-24 is negligible, and ALiBi's scores would flatten every other curve."""
POOL = {"slider": 3, "switch": 3, "choice": 3}
"""Components for the options of an encoding, by kind."""
UNUSED: dict[str, dict[str, Any]] = {
    "slider": {"label": "–", "visible": False, "minimum": 0, "maximum": 1, "value": 0},
    "switch": {"label": "–", "visible": False},
    "choice": {"label": "–", "visible": False, "choices": ["–"], "value": "–"},
}
"""The Gradio arguments of components without an option."""
SCALES = ("cut", "full", "log", "own")
"""Of scores: cut off at LOWEST_SCORE, everything, sign · log(1 + |score|), each curve by its own largest score."""
AXES = ("linear", "log")
COLOURS = ("own", "shared")
HIDDEN = 0.02
"""A curve that covers less of the axis than this share draws as a straight line."""


# The caches keep what a moving slider does not change. Subjects are never modified; the largest table has 17 MB, and a
# page shows three of them, so only a few are kept.
@lru_cache(maxsize=8)
def _subject(word: str) -> Subject:
    name, options = spec.parse(word)
    return analysis.subject(name, **options)


@lru_cache(maxsize=32)
def _meta_subject(word: str) -> Subject:
    """A subject for shapes and spans only, of the same layer for all encodings: on the meta device if it has parameters."""
    name, options = spec.parse(word)
    subject = analysis.subject(name, **analysis.LAYER_SIZES, **options)
    return subject.on_meta() if subject.parameters else subject


@lru_cache(maxsize=128)
def _meta_plan(word: str, length: int) -> Plan:
    return _meta_subject(word).plan(Positions(length))


@lru_cache(maxsize=8)
def _tables(word: str) -> Plan | None:
    """A plan whose tables serve every length; None if they depend on the positions."""
    subject = _subject(word)
    if subject.absolute or subject.encoding.axes != 1:  # a grid's plan has positions of its own
        return None
    plan = _meta_plan(word, 16)
    depends = plan.rotate is not None or plan.decay is not None or plan.pair is not None
    if depends or not plan.lookups or any(lookup.states is not None for lookup in plan.lookups) or _is_exact(word):
        return None
    with torch.no_grad():
        return subject.plan(Positions(FURTHEST))


def _is_exact(word: str) -> bool:
    """Whether a table has a row for every distance, without a limit. One with a limit may be cut to the distances of a
    short plan.
    """
    if _span(word, 16) == _span(word, 32):
        return False
    far = _span(word, FURTHEST)
    return far is None or far != _span(word, 2 * FURTHEST)


def _span(word: str, length: int) -> tuple[int, int] | None:
    return analysis.span_of(_meta_plan(word, length))


@lru_cache(maxsize=32)
def _heat(word: str, length: int, head: int, most: int, words: Translation) -> Heat:
    (drawn,) = panels.kernel(_subject(word), length, head, most=most, tables=_tables(word), words=words)
    assert isinstance(drawn, Heat)
    return drawn


@lru_cache(maxsize=32)
def _over_distance(word: str, length: int, head: int, most: int) -> Tensor:
    """The kernel of the last query over about `most` distances (0: all of them): [n]."""
    r = analysis.sample_positions(length, most or None).flip(0).neg()
    return analysis.over_distance(_subject(word), r, at=length - 1, head=head, tables=_tables(word))[0]


FAR_DISTANCES = torch.unique(torch.logspace(0, 5, 31).long()).neg().flip(0)


@lru_cache(maxsize=32)
def _far_field(word: str, head: int) -> Tensor:
    """The kernel at FAR_DISTANCES: [n]. Encodings with a row for every distance are evaluated one distance at a time,
    because one table for all of them would be too long.
    """
    subject = _subject(word)
    try:
        if not subject.absolute and _is_exact(word):
            return torch.cat([analysis.over_distance(subject, r[None], head=head)[0] for r in FAR_DISTANCES])
        return analysis.over_distance(subject, FAR_DISTANCES, head=head, tables=_tables(word))[0]
    except ValueError:  # a table of limited length has no far field
        return torch.full((len(FAR_DISTANCES),), torch.nan)


@lru_cache(maxsize=64)
def _facts(word: str) -> tuple[int, tuple[int, int] | None]:
    """(parameters, span) of an encoding."""
    subject = _meta_subject(word)
    if subject.absolute or _span(word, 256) is None:
        return subject.parameters, None
    return subject.parameters, _span(word, 256 if _is_exact(word) else FURTHEST)


class Compare(Page):
    key = "compare"
    figures = 2
    defaults = {
        "a": "t5", "b": "alibi", "c": "rope", "length": "512", "train": "256", "head": "0", "scale": "cut", "axis": "linear",
        "colours": "own",
    }  # fmt: skip

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        length = url_state.read_int(state, "length", 2, MAX_LENGTH, words)
        coarse = coarse and length > EASY
        most = COARSE if coarse else FINE
        return self._view(state, words, length, most, 2 * most, coarse=coarse)

    def export(self, state: State, words: Translation) -> list[Panel]:
        """The scores themselves, whatever the scale of the figures."""
        length = url_state.read_int(state, "length", 2, MAX_LENGTH, words)
        plain = {**state, "scale": "full", "axis": "linear", "colours": "own"}
        return self._view(plain, words, length, length if length <= EASY else FINE, length).panels()

    def _view(
        self, state: State, words: Translation, length: int, most: int, distances: int, *, coarse: bool = False
    ) -> View:  # fmt: skip
        """About `most` positions per side of a heat map, and about `distances` points per curve."""
        train = url_state.read_int(state, "train", 1, MAX_LENGTH, words)
        head = url_state.read_int(state, "head", 0, analysis.LAYER_SIZES["heads"] - 1, words)
        scale = url_state.read_choice(state, "scale", SCALES, words)
        axis = url_state.read_choice(state, "axis", AXES, words)
        colours = url_state.read_choice(state, "colours", COLOURS, words)
        chosen = {slot: spec.parse(state[slot]) for slot in SLOTS if state[slot]}
        if not chosen:
            raise InputError(words("no encoding"))
        for name, options in chosen.values():
            validate(name, options, words)
        notes: list[str] = []
        chosen_words: dict[str, str] = {}
        encodings: dict[str, tuple[str, dict[str, Any]]] = {}
        heat: list[Heat] = []
        for slot, (name, options) in chosen.items():
            label = _label(name, slot, chosen)
            checkpoint()
            try:
                drawn = _heat(state[slot], length, head, most, words)
            except ValueError as error:
                notes.append(words("library", error=f"{label}: {error}"))
                continue
            except TypeError:
                notes.append(words("bad options", options=state[slot][:200]))
                continue
            chosen_words[label], encodings[label] = state[slot], (name, options)
            heat.append(replace(drawn, title=drawn.title.replace(name, label, 1)))
        if not chosen_words:
            raise InputError(" ".join(notes))
        curves, share, hidden = _curves(chosen_words, length, train, head, distances, coarse, scale, axis, words)
        subjects = [_subject(word) for word in chosen_words.values()]
        origin = trained_notes(subjects, words)
        costs = _costs(chosen_words, length, share, words)
        return View(
            [Figure(curves, columns=3, height=370), Figure(_coloured(heat, colours, words), columns=3, height=390)],
            code=snippets.kernels(encodings, length),
            html=join([costs, *(tag("p", sentence) for sentence in [*_sampling(length, most, words), *origin])]),
            notes=[*notes, *untrained_notes(subjects, words), *axes_notes(subjects, words), *hidden],
            finer=coarse,
        )

    def controls(self, words: Translation) -> Controls:
        import gradio as gr

        slots = [_Slot(key, self.defaults[key], words) for key in SLOTS]
        length, train = (
            self.component(gr.Slider, key, words, 16, 4096, int(self.defaults[key]), step=16)
            for key in ("length", "train")
        )
        head = self.component(gr.Slider, "head", words, 0, analysis.LAYER_SIZES["heads"] - 1, 0, step=1)
        play = gr.Button(words("play"), elem_id="compare-play")
        scales = []
        for key, choices in (("scale", SCALES), ("axis", AXES), ("colours", COLOURS)):
            named = [(words(f"{key} {choice}"), choice) for choice in choices]
            scales.append(self.component(gr.Dropdown, key, words, named, value=self.defaults[key]))
        clock = gr.Timer(0.7, active=False)
        components = [component for slot in slots for component in slot.components] + [length, train, head, *scales]
        width = len(slots[0].components)

        def read(*values: Any) -> State:
            read_slots = {slot.key: slot.read(values[i * width : (i + 1) * width]) for i, slot in enumerate(slots)}
            rest = map(url_state.to_text, values[len(slots) * width :])
            return {**read_slots, **dict(zip(("length", "train", "head", "scale", "axis", "colours"), rest))}

        def write(wanted: State) -> list[Any]:
            updates = [update for slot in slots for update in slot.write(wanted[slot.key])]
            rest = [int(wanted[key]) for key in ("length", "train", "head")]
            return [*updates, *rest, *(wanted[key] for key in ("scale", "axis", "colours"))]

        def start(train_length: float) -> list[Any]:
            """Start the animation at half the training length."""
            return [max(16, int(train_length) // 2), gr.Timer(active=True)]

        def tick(now: float, train_length: float) -> list[Any]:
            """Grow the length by a quarter, up to eight times the training length."""
            end = min(4096, 8 * int(train_length))
            longer = min(end, (int(now * 1.25) + 16) // 16 * 16)
            return [longer, gr.Timer(active=longer < end)]

        handlers: list[Any] = [(slot.name.input, slot.configure, [slot.name], slot.pool) for slot in slots]
        handlers.append((play.click, start, [train], [length, clock]))
        handlers.append((clock.tick, tick, [length, train], [length, clock]))
        return Controls(components, read, write, handlers, quiet={slot.name for slot in slots})


class _Slot:
    """The controls of one encoding: its name, and a fixed pool of components configured for its options."""

    def __init__(self, key: str, name: str, words: Translation):
        import gradio as gr

        self.key, self.update = key, gr.update
        choices = [(words("no encoding here"), ""), *((n, n) for n in list_encodings())]
        with gr.Group(elem_id=f"compare-slot-{key}"):
            self.name = gr.Dropdown(
                choices, value=name, label=words("encoding of", slot=key.upper()), elem_id=f"compare-{key}"
            )
            settings = iter(_pool_settings(name))
            self.pool = [
                component(**next(settings), elem_id=f"compare-{key}-{kind}-{i}")
                for component, (kind, room) in zip((gr.Slider, gr.Checkbox, gr.Dropdown), POOL.items())
                for i in range(room)
            ]
        self.components = [self.name, *self.pool]

    def configure(self, name: str) -> list[Any]:
        """Updates of the pool for the options of an encoding."""
        return [self.update(**settings) for settings in _pool_settings(name or "")]

    def read(self, values: Any) -> str:
        name, *pool = values
        if not name:
            return ""
        given = {}
        for option, value in zip(_pool_options(name), pool):
            if option is not None and value is not None and option.value(value) != option.default:
                given[option.name] = option.value(value)
        return url_state.format_encoding(name, given)

    def write(self, word: str) -> list[Any]:
        name, given = spec.parse(word) if word else ("", {})
        updates = []
        for option, settings in zip(_pool_options(name), _pool_settings(name)):
            if option is not None and option.name in given:
                settings = {**settings, "value": option.value(given[option.name])}
            updates.append(self.update(**settings))
        return [name, *updates]


def _pool_options(name: str) -> list[Option | None]:
    """The option of each component of the pool (sliders, switches, choices); None for unused ones."""
    found = options_of(name) if name else ()
    pool: list[Option | None] = []
    for kind, room in POOL.items():
        some = [option for option in found if option.kind == kind][:room]
        pool += [*some, *[None] * (room - len(some))]
    return pool


def _pool_settings(name: str) -> list[dict[str, Any]]:
    """The Gradio arguments of each component of the pool for an encoding."""
    kinds = [kind for kind, room in POOL.items() for _ in range(room)]
    return [UNUSED[kind] if option is None else option.settings() for kind, option in zip(kinds, _pool_options(name))]


def _label(name: str, slot: str, chosen: Mapping[str, tuple[str, dict[str, Any]]]) -> str:
    twice = sum(other == name for other, _ in chosen.values()) > 1
    return f"{name} ({slot.upper()})" if twice else name


def _coloured(heat: list[Heat], colours: str, words: Translation) -> list[Panel]:
    """The heat maps with their own limits of colour, or with those of all; titles state them, since three colour bars take
    the browser as long as the heat maps.
    """
    most = [panel.limits[1] for panel in heat if panel.limits is not None]
    limits = [max(most)] * len(most) if colours == "shared" else most
    titles = [f"{panel.title}{words('colour limits', most=f'{limit:.3g}')}" for panel, limit in zip(heat, limits)]
    return [
        replace(panel, title=title, colour_bar=False, limits=(-limit, limit))
        for panel, title, limit in zip(heat, titles, limits)
    ]


def _curves(
    chosen: dict[str, str], length: int, train: int, head: int, most: int, coarse: bool, scale: str, axis: str,
    words: Translation,
) -> tuple[list[Panel], dict[str, float], list[str]]:  # fmt: skip
    """(panels over distance, of the far field and of the last query's attention; its share beyond the training length;
    notes about curves that the scale hides).
    """
    near = analysis.sample_positions(length, most).flip(0).neg()  # includes the query itself
    over, far, attention, share = {}, {}, {}, {}
    for label, word in chosen.items():
        checkpoint()
        scores = _over_distance(word, length, head, most if coarse else 0)
        distances = near if coarse else torch.arange(-(length - 1), 1)
        weights = torch.softmax(scores, 0)
        sampled = slice(None) if coarse else near + length - 1
        share[label] = float(weights[distances <= -train].sum())
        name = label if _subject(word).tables != "untrained" else words("untrained table", name=label)
        over[name], attention[name] = array(scores[sampled]), array(weights[sampled])
        far[name] = array(_far_field(word, head))
    low, high = min(share.values()), max(share.values())
    hidden = _hidden(over, scale, words)
    score: dict[str, Any] = {
        "y_label": words("score own" if scale == "own" else "score"),
        "signed_log_y": scale == "log",
    }
    lowest = [float(np.nanmin(y)) for curves in (over, far) for y in curves.values() if np.isfinite(y).any()]
    score["y_min"] = LOWEST_SCORE if scale == "cut" and min(lowest) < LOWEST_SCORE else None
    if scale == "own":
        largest = {name: float(np.nanmax(np.abs([*over[name], *far[name]]), initial=1e-12)) for name in over}
        over, far = ({name: y / largest[name] for name, y in curves.items()} for curves in (over, far))
    x: dict[str, Any] = {"x": array(near), "x_label": words("distance")}
    mark = {words("trained", length=train): float(-train)} if train < length else {}
    if axis == "log":  # the query's own position has no place on it
        past = np.flatnonzero(array(near) < 0)[::-1]
        over, attention = ({name: y[past] for name, y in curves.items()} for curves in (over, attention))
        x = {"x": -array(near)[past], "x_label": words("past distance"), "log_x": True}
        mark = {name: -at for name, at in mark.items()}
    tail = {words("trained", length=train): float(train)}
    drawn: list[Panel] = [
        Lines(words("compare over", head=head), series=over, vertical_marks=mark, **x, **score),
        Lines(
            words("compare far"), array(FAR_DISTANCES.abs())[::-1], {name: y[::-1] for name, y in far.items()},
            words("past distance"), log_x=True, vertical_marks=tail, **score,
        ),
        Lines(
            words("compare attention", low=f"{low:.0%}", high=f"{high:.0%}", train=train), series=attention, **x,
            y_label=words("weight"), vertical_marks=mark, log_y=True, y_min=1e-6,
        ),
    ]  # fmt: skip
    return drawn, share, hidden


def _hidden(over: dict[str, Any], scale: str, words: Translation) -> list[str]:
    """A note for each curve that draws as a straight line although it is none, or that is zero."""
    notes = [words("curve zero", name=name) for name, y in over.items() if not np.nansum(np.abs(y))]
    if scale == "own":
        return notes
    shown = {name: y if scale == "full" else np.maximum(y, LOWEST_SCORE) for name, y in over.items()}
    if scale == "log":
        shown = {name: np.sign(y) * np.log10(1 + np.abs(y)) for name, y in over.items()}
    whole = max(float(np.nanmax(y)) for y in shown.values()) - min(float(np.nanmin(y)) for y in shown.values())
    for name, y in shown.items():
        if 0 < _spread(y) < HIDDEN * whole:
            notes.append(words("curve hidden", name=name, spread=f"{_spread(over[name]):.2g}"))
    return notes


def _spread(y: Array) -> float:
    return float(np.nanmax(y) - np.nanmin(y))


def _costs(chosen: dict[str, str], length: int, share: dict[str, float], words: Translation) -> Markup:
    """An HTML table of each encoding's cost at this length."""
    heads = analysis.LAYER_SIZES["heads"]
    header = ("encoding", "parameters", "own memory", "dense memory", "constant beyond", "share past")
    rows, dense = [], _format_bytes(4 * heads * length * length)
    for label, word in chosen.items():
        parameters, span = _facts(word)
        constant = words("never") if span is None or max(-span[0], span[1]) >= 255 else f"{-span[0]} / {span[1]}"
        own = _format_bytes(plan_memory(word, length))
        rows.append((label, f"{parameters:,}", own, dense, constant, f"{share[label]:.1%}"))
    return facts_table([words(name) for name in header], rows, caption=words("costs", length=length))


def _sampling(length: int, most: int, words: Translation) -> list[str]:
    """A note if the heat maps show only some of the positions."""
    if length <= most:
        return []
    number = len(analysis.sample_positions(length, most))
    return [words("sampled" if length <= EASY else "sampled csv", most=number, length=length)]


def plan_memory(word: str, length: int) -> int:
    """Bytes of a plan's tensors at this length; of long ones extrapolated from two plans: they grow linearly with it."""
    if _meta_subject(word).absolute:
        return 4 * length * _meta_subject(word).d_model
    if length <= 1024:
        return _bytes(_meta_plan(word, length))
    short, twice = (_bytes(_meta_plan(word, n)) for n in (1024, 2048))
    return short + (twice - short) * (length - 1024) // 1024


def _bytes(plan: Plan) -> int:
    tensors = [tensor for _, tensor in plan.tensors()]
    if plan.rotate is not None:
        phases = {id(t): t for side in (plan.rotate.q, plan.rotate.k) if side is not None for t in side}
        tensors += phases.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _format_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
