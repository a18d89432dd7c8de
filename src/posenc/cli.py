"""The command line."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    from . import __version__

    print(f"posenc {__version__}")
    return 0
