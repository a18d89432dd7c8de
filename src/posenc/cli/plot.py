"""posenc plot: write a figure of an encoding as png, svg or pdf.

The arguments are checked and the first line is printed here, before torch and matplotlib are loaded.
"""

from __future__ import annotations

import argparse

from ..core import files
from ..core.errors import OptionError
from ..encodings import spec
from ..encodings.registry import list_encodings
from . import terminal
from .show import ORIGINAL

VIEWS = (
    "overview", "encoding", "dimensions", "similarity", "kernel", "distance", "buckets", "decomposition", "wavelengths",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="posenc plot",
        description="Write a figure of an encoding as png, svg or pdf, by the suffix of the file name.",
        epilog=f"encodings: {', '.join(list_encodings())}. Options follow the name: t5:buckets=16,causal=true",
    )
    parser.add_argument(
        "encoding",
        help="NAME, NAME:OPTION=VALUE,... or rope+EXTENSION:FACTOR; sizes (d_model, heads, head_dim) are options",
    )
    parser.add_argument("-o", "--output", help="file to write; default NAME.png")
    parser.add_argument("--view", choices=VIEWS, default="overview", help="which figure (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, help="positions, or distance to each side (default: 128; decomposition: 24)"
    )
    parser.add_argument("--head", type=int, help="head of views that show a single head (default: 0)")
    given = parser.parse_args(arguments)
    try:
        path = _write(given)
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(f"plot {given.encoding}: {error}") from None
    print(path)
    return 0


def _write(given: argparse.Namespace) -> str:
    text = spec.normalise(given.encoding)
    spec.check(text)
    encoding, extension = spec.split_extension(text)
    name, options = spec.parse(encoding)
    output = given.output or f"{name}.png"
    files.figure_format(output)
    terminal.announce(f"posenc plot: 1/2 loading PyTorch and matplotlib for {output} …")
    from .. import plot

    if extension is not None:
        options["scaling"] = spec.make_extension(name, text, extension, ORIGINAL)
    terminal.announce(f"posenc plot: 2/2 drawing {given.view} of {text} …")

    if given.view == "wavelengths":
        if name != "rope":
            raise OptionError(f"{name} has no wavelengths; give rope: posenc plot rope --view wavelengths")
        if given.head is not None:
            raise OptionError("wavelengths are the same for every head; leave out --head")
        options = {key: value for key, value in options.items() if value is not None}
        unknown = set(options) - {"head_dim", "base"}
        if unknown:
            raise OptionError(f"wavelengths take the options head_dim and base, got {', '.join(sorted(unknown))}")
        drawing = plot.wavelengths(**options, **({} if given.length is None else {"original": given.length}))
        return str(plot.save(drawing, output))
    if given.length is not None and not 1 <= given.length <= 4096:
        raise OptionError(f"--length must be from 1 to 4096, got {given.length}")
    if given.head is not None:
        if given.view == "buckets":
            raise OptionError("buckets are the same for every head; leave out --head")
        options["selected_heads" if given.view == "distance" else "head"] = (
            [given.head] if given.view == "distance" else given.head
        )
    if given.length is not None:
        options["reach" if given.view in ("distance", "buckets") else "length"] = given.length
    return str(plot.save(plot.VIEWS[given.view](name, **options), output))
