"""Compare: two or three encodings side by side, with sliders made from their options, at a chosen length."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.plan import Plan
from ..core.positions import Positions
from ..encodings.registry import list_encodings
from ..plot import numbers, panels
from ..plot.numbers import Subject
from ..plot.panels import Heat, Lines, Panel, array
from ..plot.words import Words
from . import snippets, state
from .options import Option, options_of, validate
from .state import Sorry, State
from .stop import checkpoint
from .view import Controls, Figure, Page, View

SLOTS = ("a", "b", "c")
LONGEST = 65536
COARSE, FINE, EASY = 64, 192, 512
"""Positions drawn of each side of a heat map: first, and then; up to EASY tokens there is no first, and the export
holds every position.
"""
NOTHING = -24.0
"""Scores below this are cut off: e^-24 of the attention is nothing, and ALiBi would flatten every other curve."""
SLIDERS, SWITCHES, CHOICES = 3, 3, 3


# What one slider does not touch is not computed again. Subjects are only read. Three are on the page; a largest table
# has 17 MB, so few more are kept.
@lru_cache(maxsize=8)
def _subject(word: str) -> Subject:
    name, options = state.encoding(word)
    return numbers.subject(name, **options)


@lru_cache(maxsize=32)
def _hollow(word: str) -> Subject:
    """What tells shapes and spans at little cost: without numbers, or itself where nothing is learned."""
    subject = _subject(word)
    return subject.hollow() if subject.parameters else subject


@lru_cache(maxsize=128)
def _sketch(word: str, length: int) -> Plan:
    return _hollow(word).plan(Positions(length))


@lru_cache(maxsize=8)
def _tables(word: str) -> Plan | None:
    """A plan whose tables serve every length, so that they are made once; None where a plan depends on its positions."""
    subject = _subject(word)
    if subject.absolute:
        return None
    sketch = _sketch(word, 16)
    depends = sketch.rotate is not None or sketch.decay is not None or sketch.pair is not None
    if depends or not sketch.lookups or any(lookup.states is not None for lookup in sketch.lookups) or _exact(word):
        return None
    with torch.no_grad():
        return subject.plan(Positions(16))


def _exact(word: str) -> bool:
    """Whether a table has a row for each distance, however far."""
    return numbers.span_of(_sketch(word, 16)) != numbers.span_of(_sketch(word, 32))


@lru_cache(maxsize=32)
def _heat(word: str, length: int, head: int, most: int, words: Words) -> Panel:
    (drawn,) = panels.kernel(_subject(word), length, head, most=most, tables=_tables(word), words=words)
    assert isinstance(drawn, Heat)
    assert drawn.limits is not None
    title = f"{drawn.title} {words('colours', most=f'{drawn.limits[1]:.3g}')}"
    return replace(drawn, title=title, bar=False)  # three bars would take the browser as long as the heat maps


@lru_cache(maxsize=32)
def _over(word: str, length: int, head: int, some: int) -> Tensor:
    """The last query's kernel over all distances, or over about `some` of them (0: all): [n]."""
    r = numbers.positions(length, some or None).flip(0).neg()
    return numbers.over_distance(_subject(word), r, at=length - 1, head=head, tables=_tables(word))[0]


FAR = torch.unique(torch.logspace(0, 5, 31).long()).neg().flip(0)


@lru_cache(maxsize=32)
def _far(word: str, head: int) -> Tensor:
    """The kernel at distances up to 100 000: [n]. A table with a row for each distance would be long, so such
    encodings are asked one distance at a time.
    """
    subject = _subject(word)
    try:
        if not subject.absolute and _exact(word):
            return torch.cat([numbers.over_distance(subject, r[None], head=head)[0] for r in FAR])
        return numbers.over_distance(subject, FAR, head=head, tables=_tables(word))[0]
    except ValueError:  # a table that ends has no far field
        return torch.full((len(FAR),), torch.nan)


@lru_cache(maxsize=64)
def _facts(word: str) -> tuple[int, tuple[int, int] | None]:
    """(parameters, span) of an encoding."""
    subject = _subject(word)
    return subject.parameters, None if subject.absolute else numbers.span_of(_sketch(word, 256))


class Compare(Page):
    key = "compare"
    figures = 2
    defaults = {"a": "t5", "b": "alibi", "c": "rope", "length": "512", "train": "256", "head": "0"}

    def draw(self, state_: State, words: Words, *, coarse: bool = False) -> View:
        length = state.number(state_, "length", 2, LONGEST, words)
        coarse = coarse and length > EASY
        most = COARSE if coarse else FINE
        return self._view(state_, words, length, most, 2 * most, coarse=coarse)

    def export(self, state_: State, words: Words) -> list[Panel]:
        length = state.number(state_, "length", 2, LONGEST, words)
        return self._view(state_, words, length, length if length <= EASY else FINE, length).panels()

    def _view(
        self, state_: State, words: Words, length: int, most: int, distances: int, *, coarse: bool = False
    ) -> View:  # fmt: skip
        """About `most` positions of each side of a heat map, and about so many distances of a curve."""
        train = state.number(state_, "train", 1, LONGEST, words)
        head = state.number(state_, "head", 0, numbers.SIZES["heads"] - 1, words)
        chosen = {slot: state.encoding(state_[slot]) for slot in SLOTS if state_[slot]}
        if not chosen:
            raise Sorry(words("no encoding"))
        for name, options in chosen.values():
            validate(name, options, words)
        notes: list[str] = []
        chosen_words: dict[str, str] = {}
        heat: list[Panel] = []
        for slot, (name, _) in chosen.items():
            label = _label(name, slot, chosen)
            checkpoint()
            try:
                drawn = _heat(state_[slot], length, head, most, words)
            except ValueError as error:
                notes.append(words("library", error=f"{label}: {error}"))
                continue
            except TypeError:
                notes.append(words("bad options", options=state_[slot][:200]))
                continue
            chosen_words[label] = state_[slot]
            heat.append(_renamed(drawn, label, name))
        if not chosen_words:
            raise Sorry(" ".join(notes))
        curves, share = _curves(chosen_words, length, train, head, distances, coarse, words)
        made = {
            _label(name, slot, chosen): {"name": name, "options": options}
            for slot, (name, options) in chosen.items()
            if _label(name, slot, chosen) in chosen_words
        }
        return View(
            [Figure(curves, columns=3, height=370), Figure(heat, columns=3, height=390)],
            code=snippets.compared(made, length),
            html=_costs(chosen_words, length, share, words) + _sampling(length, most, words),
            notes=notes,
            finer=coarse,
        )

    def controls(self, words: Words) -> Controls:
        import gradio as gr

        slots = [_Slot(key, self.defaults[key], words) for key in SLOTS]
        length = gr.Slider(
            16, 4096, int(self.defaults["length"]), step=16, label=words("length"), elem_id="compare-length"
        )
        train = gr.Slider(16, 4096, int(self.defaults["train"]), step=16, label=words("train"), elem_id="compare-train")
        head = gr.Slider(0, numbers.SIZES["heads"] - 1, 0, step=1, label=words("which head"), elem_id="compare-head")
        play = gr.Button(words("play"), elem_id="compare-play")
        clock = gr.Timer(0.7, active=False)
        components = [component for slot in slots for component in slot.components] + [length, train, head]
        width = len(slots[0].components)

        def read(*values: Any) -> State:
            read_slots = {
                slot.key: slot.read(values[i * width : (i + 1) * width]) for i, slot in enumerate(slots)
            }  # fmt: skip
            rest = map(state.plain, values[len(slots) * width :])
            return {**read_slots, **dict(zip(("length", "train", "head"), rest))}

        def write(wanted: State) -> list[Any]:
            updates = [update for slot in slots for update in slot.write(wanted[slot.key])]
            return [*updates, *(int(wanted[key]) for key in ("length", "train", "head"))]

        def start(train_length: float) -> list[Any]:
            return [max(16, int(train_length) // 2), gr.Timer(active=True)]

        def tick(now: float, train_length: float) -> list[Any]:
            """A quarter longer each time, to eight times the training length."""
            end = min(4096, 8 * int(train_length))
            longer = min(end, (int(now * 1.25) + 16) // 16 * 16)
            return [longer, gr.Timer(active=longer < end)]

        first: list[Any] = [(slot.name.input, slot.reshape, [slot.name], slot.pool) for slot in slots]
        first += [(play.click, start, [train], [length, clock]), (clock.tick, tick, [length, train], [length, clock])]
        return Controls(components, read, write, first, quiet={slot.name for slot in slots})


class _Slot:
    """One encoding: its name and a pool of controls that take the shape of its options."""

    def __init__(self, key: str, name: str, words: Words):
        import gradio as gr

        self.key, self.update = key, gr.update
        choices = [(words("no encoding here"), ""), *((n, n) for n in list_encodings())]
        with gr.Group(elem_id=f"compare-slot-{key}"):
            self.name = gr.Dropdown(
                choices, value=name, label=words("encoding of", slot=key.upper()), elem_id=f"compare-{key}"
            )
            shape = _shape(name)
            self.pool = [gr.Slider(**shape[i], elem_id=f"compare-{key}-slider-{i}") for i in range(SLIDERS)]
            self.pool += [
                gr.Checkbox(**shape[SLIDERS + i], elem_id=f"compare-{key}-switch-{i}") for i in range(SWITCHES)
            ]
            self.pool += [
                gr.Dropdown(**shape[SLIDERS + SWITCHES + i], elem_id=f"compare-{key}-choice-{i}")
                for i in range(CHOICES)
            ]
        self.components = [self.name, *self.pool]

    def reshape(self, name: str) -> list[Any]:
        return [self.update(**shape) for shape in _shape(name or "")]

    def read(self, values: Any) -> str:
        name, *pool = values
        if not name:
            return ""
        given = {}
        for option, value in zip(_placed(name), pool):
            if option is not None and value is not None and option.value(value) != option.default:
                given[option.name] = option.value(value)
        return state.word(name, given)

    def write(self, word: str) -> list[Any]:
        name, given = state.encoding(word) if word else ("", {})
        updates = []
        for option, shape in zip(_placed(name), _shape(name)):
            if option is not None and option.name in given:
                shape = {**shape, "value": option.value(given[option.name])}
            updates.append(self.update(**shape))
        return [name, *updates]


def _placed(name: str) -> list[Option | None]:
    """The options of an encoding at their places in the pool: sliders, switches, choices."""
    found = options_of(name) if name else ()
    placed: list[Option | None] = []
    for kind, room in (("slider", SLIDERS), ("switch", SWITCHES), ("choice", CHOICES)):
        some = [option for option in found if option.kind == kind][:room]
        placed += [*some, *[None] * (room - len(some))]
    return placed


def _shape(name: str) -> list[dict[str, Any]]:
    """What each control of the pool is to be for an encoding."""
    shapes: list[dict[str, Any]] = []
    for place, option in enumerate(_placed(name)):
        if option is None:
            shape: dict[str, Any] = {"label": "–", "visible": False}
            if place < SLIDERS:
                shape |= {"minimum": 0, "maximum": 1, "value": 0}
            elif place >= SLIDERS + SWITCHES:
                shape |= {"choices": ["–"], "value": "–"}
        else:
            shape = {"label": option.name, "visible": True, "value": option.default}
            if option.kind == "slider":
                shape |= {"minimum": option.low, "maximum": option.high, "step": option.step}
            elif option.kind == "choice":
                shape |= {"choices": [(f"{c:g}" if isinstance(c, float) else str(c), c) for c in option.choices]}
        shapes.append(shape)
    return shapes


def _label(name: str, slot: str, chosen: dict[str, tuple[str, dict[str, Any]]]) -> str:
    twice = sum(other == name for other, _ in chosen.values()) > 1
    return f"{name} ({slot.upper()})" if twice else name


def _renamed(panel: Panel, label: str, name: str) -> Panel:
    return replace(panel, title=panel.title.replace(name, label, 1))


def _curves(
    chosen: dict[str, str], length: int, train: int, head: int, most: int, coarse: bool, words: Words
) -> tuple[list[Panel], dict[str, float]]:
    """Over distance, far away, and the last query's attention; and its share past the training length."""
    near = numbers.positions(length, most).flip(0).neg()  # the query itself is always among them
    over, away, attention, share = {}, {}, {}, {}
    for label, word in chosen.items():
        checkpoint()
        scores = _over(word, length, head, most if coarse else 0)
        whole = near if coarse else torch.arange(-(length - 1), 1)
        weights = torch.softmax(scores, 0)
        shown = slice(None) if coarse else near + length - 1
        over[label], attention[label] = array(scores[shown]), array(weights[shown])
        share[label] = float(weights[whole <= -train].sum())
        away[label] = array(_far(word, head))
    mark = {words("trained", length=train): float(-train)} if train < length else {}
    tail = {words("trained", length=train): float(train)}
    low = min(share.values()), max(share.values())
    lowest = [float(np.nanmin(y)) for curves in (over, away) for y in curves.values() if np.isfinite(y).any()]
    floor = NOTHING if min(lowest) < NOTHING else None
    drawn: list[Panel] = [
        Lines(
            words("compare over", head=head), array(near), over, words("distance"), words("score"), upright=mark,
            floor=floor,
        ),
        Lines(
            words("compare far"), array(FAR.abs()), away, words("past distance"), words("score"), log_x=True,
            upright=tail, floor=floor,
        ),
        Lines(
            words("compare attention", low=f"{low[0]:.0%}", high=f"{low[1]:.0%}", train=train), array(near), attention,
            words("distance"), words("weight"), upright=mark, log_y=True, floor=1e-6,
        ),
    ]  # fmt: skip
    return drawn, share


def _costs(chosen: dict[str, str], length: int, share: dict[str, float], words: Words) -> str:
    """A table of what each encoding costs at this length."""
    heads = numbers.SIZES["heads"]
    header = ("encoding", "parameters", "own memory", "dense memory", "constant beyond", "share past")
    rows = []
    for label, word in chosen.items():
        parameters, span = _facts(word)
        ends = None if span is None else (-span[0], span[1])
        constant = words("never") if ends is None or max(ends) >= 255 else f"{ends[0]} / {ends[1]}"
        rows.append(
            (label, f"{parameters:,}", _size(own_memory(word, length)), _size(4 * heads * length * length),
             constant, f"{share[label]:.1%}")
        )  # fmt: skip
    head = "".join(f'<th scope="col">{escape(words(name))}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<table class="facts"><caption>{escape(words("costs", length=length))}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _sampling(length: int, most: int, words: Words) -> str:
    """Says so where a heat map cannot show every position."""
    if length <= most:
        return ""
    shown = len(numbers.positions(length, most))
    told = words("sampled" if length <= EASY else "sampled csv", most=shown, length=length)
    return f"<p>{escape(told)}</p>"


def own_memory(word: str, length: int) -> int:
    """Bytes of a plan's own tensors at this length: they grow by the same for every token, so two short plans tell."""
    if _subject(word).absolute:
        return 4 * length * _subject(word).d_model
    short, twice = (_bytes(_sketch(word, n)) for n in (16, 32))
    return short + (twice - short) * (length - 16) // 16


def _bytes(plan: Plan) -> int:
    tensors = [tensor for _, tensor in plan.tensors()]
    if plan.rotate is not None:
        phases = {id(t): t for side in (plan.rotate.q, plan.rotate.k) if side is not None for t in side}
        tensors += phases.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
