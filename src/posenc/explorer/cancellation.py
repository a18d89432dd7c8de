"""Cooperative cancellation of a drawing: `checkpoint` raises Cancelled between its parts once cancellation is requested.

An exception at any other point could leave a library half imported, and the process unusable for the next drawing.
"""

from __future__ import annotations

from typing import Any


class Cancelled(BaseException):
    """The drawing ends here. Not an Exception, so that no `except Exception` catches it."""


_requested = False


def request_cancel(*_: Any) -> None:
    """Make the next checkpoint raise; a signal handler."""
    global _requested
    _requested = True


def reset() -> None:
    global _requested
    _requested = False


def checkpoint() -> None:
    """Raise Cancelled if cancellation was requested."""
    if _requested:
        raise Cancelled
