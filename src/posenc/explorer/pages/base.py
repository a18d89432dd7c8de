"""The base class of pages, and View: the figures and texts that a page draws for a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...core import documentation
from ...core.html_tags import Markup, join, tag
from ...core.translation import Translation
from ...plot.panels import Panel
from ..url_state import LABELS, State


@dataclass(frozen=True)
class Figure:
    panels: Sequence[Panel]
    columns: int = 2
    height: int = 380
    mosaic: bool = False  # many small heat maps of one size


@dataclass(frozen=True)
class View:
    """Figures, a block of HTML, code that computes the same values, and notes for the user."""

    figures: Sequence[Figure]
    code: str = ""
    html: str = ""
    notes: Sequence[str] = ()
    finer: bool = False  # whether drawing with coarse=False gives more detail

    def panels(self) -> list[Panel]:
        return [panel for figure in self.figures for panel in figure.panels]


@dataclass
class Controls:
    """A page's components, and the conversion between their values and the page's state."""

    components: list[Any]
    read: Callable[..., State]
    write: Callable[[State], list[Any]]
    # (event, function, inputs, outputs[, what page.js makes of the inputs]): server-side handlers that run before the
    # event redraws the view
    handlers: list[tuple[Any, ...]] = field(default_factory=list)
    quiet: set[Any] = field(default_factory=set)  # components whose own events do not redraw


class Page:
    """One page of the explorer. Only `controls` imports gradio: the drawing process does not need it."""

    key: ClassVar[str]
    figures: ClassVar[int] = 1
    html_first: ClassVar[bool] = False  # whether the HTML is above the figures
    defaults: ClassVar[Mapping[str, str]]

    def draw(self, state: State, words: Translation, *, coarse: bool = False) -> View:
        """The view of a complete state. Raises a ValueError with a sentence for the user if it cannot be drawn."""
        raise NotImplementedError

    def export(self, state: State, words: Translation) -> list[Panel]:
        """The panels to export: those of the view, or the same with more values."""
        return self.draw(state, words).panels()

    def controls(self, words: Translation) -> Controls:
        """Create the components inside the caller's Gradio column."""
        raise NotImplementedError

    def component(self, kind: Any, key: str, words: Translation, *values: Any, **more: Any) -> Any:
        """A Gradio component for a parameter: its label and its id follow from the parameter's name."""
        label = words(LABELS.get(key, key))
        return kind(*values, **{"label": label, "elem_id": f"{self.key}-{key}", **more})

    def defaults_in(self, words: Translation) -> Mapping[str, str]:
        """The defaults in a language."""
        return self.defaults

    def complete(self, given: Mapping[str, str], words: Translation | None = None) -> State:
        """The state for some parameters, with defaults for the others: those of a language, if it is given."""
        defaults = self.defaults if words is None else self.defaults_in(words)
        return {key: given.get(key, default) for key, default in defaults.items()}


def documentation_link(page: str, text: str, words: Translation) -> Markup:
    """A link to a page of the documentation: on its site, or as built in this clone. Without either, how to build it."""
    address = documentation.address_of(page, words("language"))
    if documentation.built_site() is not None and not address.startswith("http"):
        address = f"/docs/{documentation.path_of(page, words('language'))}"
    if not address.startswith(("http", "/")):
        return join([text, ": ", tag("code", address)])
    return tag("a", text, href=address, target="_blank", rel="noopener")


def facts_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = (), caption: str = "", **attributes: str
) -> Markup:  # fmt: skip
    """A table whose first column names the rows; on narrow screens each cell has its column's name."""
    lines = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell, data_label=name) for name, cell in zip(header[1:], row[1:])), **kind)
        for row, kind in zip(rows, [{"class_": one} for one in classes] or [{}] * len(rows))
    ]  # fmt: skip
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    return tag("table", *[tag("caption", caption)] * bool(caption), head, tag("tbody", *lines), class_="facts", **attributes)  # fmt: skip
