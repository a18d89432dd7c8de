"""A view as the drawing process makes it, without the server: from the values of controls, or from a link."""

from typing import Any

from posenc.core.translation import Translation
from posenc.explorer.pages.base import Controls, Page
from posenc.explorer.render import ViewData, error_response, render_state, state_of_query, state_of_values


def render_values(
    page: Page, controls: Controls, words: Translation, values: Any, *, width: int, coarse: bool
) -> ViewData:
    """The view for the values of the controls."""
    try:
        state = state_of_values(controls, words, values)
    except ValueError as error:
        return error_response(error, words)
    return render_state(page, words, state, width=width, coarse=coarse)


def render_query(page: Page, words: Translation, query: str, *, width: int, coarse: bool) -> ViewData:
    """The view of a link."""
    try:
        state, notes = state_of_query(page, words, query)
    except ValueError as error:
        return error_response(error, words)
    return render_state(page, words, state, width=width, coarse=coarse, notes=notes)
