"""View: what a page shows, as a function of its link. Page: the interface that each page's file fills in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..plot.panels import Panel
from ..plot.words import Words
from .state import State


@dataclass(frozen=True)
class Figure:
    panels: Sequence[Panel]
    columns: int = 2
    height: int = 380
    mosaic: bool = False  # many small heat maps of one size


@dataclass(frozen=True)
class View:
    """Figures, a block of HTML, the code that makes the same numbers, and sentences for the reader."""

    figures: Sequence[Figure]
    code: str = ""
    html: str = ""
    notes: Sequence[str] = ()
    finer: bool = False  # whether drawing again with coarse=False shows more

    def panels(self) -> list[Panel]:
        return [panel for figure in self.figures for panel in figure.panels]


@dataclass
class Controls:
    """A page's components, and how their values are a state and back."""

    components: list[Any]
    read: Callable[..., State]
    write: Callable[[State], list[Any]]
    # (event, function, inputs, outputs): done before the redraw that the event asks for
    first: list[tuple[Any, Callable[..., Any], list[Any], list[Any]]] = field(default_factory=list)
    quiet: set[Any] = field(default_factory=set)  # components whose input alone does not redraw


class Page:
    """Gradio is imported inside `controls` alone: the process that draws needs none of it."""

    key: ClassVar[str]
    figures: ClassVar[int] = 1
    html_first: ClassVar[bool] = False  # whether the block of HTML stands above the figures
    defaults: ClassVar[Mapping[str, str]]

    def draw(self, state: State, words: Words, *, coarse: bool = False) -> View:
        """The view of a complete state. What cannot be shown raises ValueError with a sentence for the reader."""
        raise NotImplementedError

    def export(self, state: State, words: Words) -> list[Panel]:
        """The numbers of a view, to be kept: what is drawn, or more of it."""
        return self.draw(state, words).panels()

    def controls(self, words: Words) -> Controls:
        """Make the components, inside the caller's column."""
        raise NotImplementedError

    def complete(self, given: Mapping[str, str]) -> State:
        """The state of a link: what it says, and defaults for the rest."""
        return {key: given.get(key, default) for key, default in self.defaults.items()}
