"""What the lab says when it cannot go on."""

from __future__ import annotations

from ..core.errors import OptionError


class LabError(OptionError):
    """Something that the person who asked can change: a wrong word, a full disk, a missing package."""


class CellFailure(RuntimeError):
    """Cells that raised what nobody expected, with their tracebacks; the others were done."""
