"""The lab's exceptions."""

from __future__ import annotations

from ..core.errors import OptionError


class LabError(OptionError):
    """An error that the user can fix: a wrong specification, a full disk, a missing package."""


class TrialFailure(RuntimeError):
    """Trials that raised unexpected errors, with their tracebacks; the other trials finished."""
