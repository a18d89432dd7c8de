"""Where a drawing may be left: `checkpoint` stands between its parts, and ends it once nobody waits for it.

An exception at any other place could leave a library half imported, and the process useless for the next drawing.
"""

from __future__ import annotations

from typing import Any


class Stopped(BaseException):
    """The drawing is to end. No `except Exception` on the way may keep it."""


_wanted = False


def request(*_: Any) -> None:
    """Let the next checkpoint end the drawing; a signal's handler."""
    global _wanted
    _wanted = True


def reset() -> None:
    global _wanted
    _wanted = False


def checkpoint() -> None:
    if _wanted:
        raise Stopped
