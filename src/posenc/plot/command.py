"""posenc plot ENCODING -o FILE."""

from __future__ import annotations

import argparse

from ..core.errors import OptionError
from ..encodings import spec
from ..encodings.registry import list_encodings

VIEWS = (
    "overview", "encoding", "dimensions", "similarity", "kernel", "distance", "buckets", "decomposition", "wavelengths",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc plot",
        description="A picture of an encoding, from its own numbers: png, svg or pdf by the file's name.",
        epilog=f"encodings: {', '.join(list_encodings())}. Options follow the name: t5:buckets=16,causal=true",
    )
    parser.add_argument("encoding", help="NAME or NAME:OPTION=VALUE,...; sizes (d_model, heads, head_dim) are options")
    parser.add_argument("-o", "--output", help="file to write; default NAME.png")
    parser.add_argument("--view", choices=VIEWS, default="overview", help="which picture (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, help="positions, or distance to each side (default: 128; decomposition: 24)"
    )
    parser.add_argument("--head", type=int, help="which head, where the view shows one (default: 0)")
    given = parser.parse_args(arguments)
    try:
        path = _write(given)
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(f"plot {given.encoding}: {error}") from None
    print(path)
    return 0


def _write(given: argparse.Namespace) -> str:
    name, options = spec.parse(given.encoding)
    output = given.output or f"{name}.png"
    from .. import plot

    if given.view == "wavelengths":
        if name != "rope":
            raise OptionError(f"wavelengths are rotary: posenc plot rope --view wavelengths, not {name}")
        if given.head is not None:
            raise OptionError("wavelengths are the same for every head; leave out --head")
        options = {key: value for key, value in options.items() if value is not None}
        unknown = set(options) - {"head_dim", "base"}
        if unknown:
            raise OptionError(f"wavelengths take head_dim and base, not {', '.join(sorted(unknown))}")
        drawing = plot.wavelengths(**options, **({} if given.length is None else {"original": given.length}))
        return str(plot.save(drawing, output))
    if given.length is not None and not 1 <= given.length <= 4096:
        raise OptionError(f"--length {given.length} cannot be drawn; give 1 to 4096")
    if given.head is not None:
        if given.view == "buckets":
            raise OptionError("buckets are the same for every head; leave out --head")
        options["shown" if given.view == "distance" else "head"] = (
            [given.head] if given.view == "distance" else given.head
        )
    if given.length is not None:
        options["reach" if given.view in ("distance", "buckets") else "length"] = given.length
    return str(plot.save(plot.VIEWS[given.view](name, **options), output))
