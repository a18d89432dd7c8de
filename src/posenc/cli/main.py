"""The entry point of `posenc`: a table of commands, each imported when it is called.

A command is one entry of COMMANDS: its name, "module:function", one line of help, and the extra that it needs.
The function takes the remaining arguments (a list of strings) and returns an exit status (None is 0).
Nothing here imports torch, so `posenc`, `posenc list` and `posenc show` start at once.
Only the standard library is used: posenc depends on torch alone, and importing rich would double the start-up time.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
from importlib.util import find_spec
from typing import NamedTuple

from .. import __version__
from ..core.errors import OptionError, UnsupportedPlan
from . import terminal


class Command(NamedTuple):
    target: str  # "module:function" under posenc
    help: str
    extra: str | None = None


COMMANDS: dict[str, Command] = {
    "list": Command(
        "cli.show:list_command", "list every encoding: family, where it applies, parameters, extrapolation"
    ),
    "show": Command("cli.show:show_command", "show one encoding: formula, options and a picture, e.g. posenc show t5"),
    "plot": Command("cli.plot:main", "write a figure of an encoding, e.g. posenc plot t5 -o t5.png", "plot"),
    "rope-diff": Command(
        "cli.rope_diff:main", "compare the rotations of two RoPE configurations: A.json B.json --length N"
    ),
    # a report needs torch only; the extra `lab` adds training (safetensors) and the live table
    "compare": Command("lab.cli:compare", "train small models that differ only in their encoding and recommend one"),
    "report": Command("lab.cli:show_report", "rebuild the report of a comparison, or put two side by side"),
    "claims": Command("lab.cli:claims", "test common claims about positional encodings"),
    "explore": Command("explorer.cli:main", "explore every encoding in the browser, on a local server", "explorer"),
    "bench": Command(
        "bench.cli:main", "measure time and memory against PyTorch's attention and other libraries", "bench"
    ),
}

# The modules of each extra; they are checked before a command starts, so that it does not fail halfway.
EXTRAS: dict[str | None, tuple[str, ...]] = {
    "hf": ("transformers",),
    "lab": ("numpy", "rich", "safetensors"),
    "plot": ("matplotlib",),
    "explorer": ("gradio", "matplotlib", "plotly"),
    "bench": ("matplotlib", "psutil", "rich"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `posenc ARGV`. Returns the exit status: 0 success, 1 failure, 2 invalid arguments."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    terminal.prepare()
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the pipe has closed it: posenc list | head
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _discard_output()
        print(
            f"posenc: cannot write the output: {error.strerror}; free some space, or write elsewhere", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _discard_output() -> None:
    """Python flushes stdout when it exits; what cannot be written must not raise again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        print(f"posenc {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return fail(f"unknown command {name!r}{hint}; the commands are {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    missing = [module for module in EXTRAS.get(command.extra, ()) if find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        what = f"{', '.join(missing)}, which {verb} not installed"
        return fail(f"posenc {name} needs {what}: pip install 'posenc[{command.extra}]'")
    try:
        return call(command.target, rest) or 0
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return fail(f"posenc {name} needs PyTorch, which is not installed: pip install torch")
    except (OptionError, UnsupportedPlan) as error:
        return fail(str(error))


def call(target: str, arguments: list[str]) -> int | None:
    """Import "module:function" and call it."""
    module, function = target.split(":")
    return getattr(importlib.import_module(f"posenc.{module}"), function)(arguments)


def fail(sentence: str) -> int:
    """Print an error to stderr; returns its exit status."""
    print(f"posenc: {sentence}", file=sys.stderr)
    return 2


def usage() -> str:
    """The text of `posenc --help`."""
    bold, dim = terminal.bold, terminal.dim
    wide = max(map(len, COMMANDS))
    lines = [
        "posenc: every positional encoding for attention, behind one interface",
        "",
        bold("usage") + "  posenc COMMAND [arguments]     posenc COMMAND --help     posenc --version",
        "",
    ]
    for name, command in COMMANDS.items():
        extra = dim(f"  [{command.extra}]") if command.extra else ""
        lines += terminal.hanging(f"  {bold(name)}{' ' * (wide - len(name))}  ", command.help, after=extra)
    if any(command.extra for command in COMMANDS.values()):
        lines += ["", dim("[name]: the extra that a command needs, pip install 'posenc[name]'")]
    return "\n".join(lines)
