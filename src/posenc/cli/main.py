"""The command line: a table of commands, each loaded when it is called.

A command is one line of COMMANDS: its name, "module:function", one line of help, and the extra that it needs.
The function takes the remaining arguments (a list of strings) and returns an exit status (None is 0).
Nothing here imports torch, so `posenc`, `posenc list` and `posenc show` answer at once.
Only the standard library is used: the core depends on torch alone, and rich would double the time to the first line.
"""

from __future__ import annotations

import difflib
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
        "cli.show:list_command", "every encoding: where it enters, its parameters, whether it extrapolates"
    ),
    "show": Command("cli.show:show_command", "one encoding: formula, options and a picture, e.g. posenc show t5"),
    "plot": Command("plot.command:main", "a picture of an encoding, e.g. posenc plot t5 -o t5.png", "plot"),
    "rope-diff": Command(
        "cli.rope_diff:main", "where two RoPE configurations turn differently: A.json B.json --length N"
    ),
    # a report needs torch alone; the lab's extra adds training (safetensors), the live table and figures that move
    "compare": Command("lab.cli:compare", "train small models that differ in their encoding and say which to use"),
    "report": Command("lab.cli:show_report", "build a comparison's report again, or set two side by side"),
    "claims": Command("lab.claims:main", "what textbooks say about positional encodings, put on trial"),
    "explore": Command(
        "explorer.command:main", "look at every encoding in the browser, on this machine alone", "explorer"
    ),
    "bench": Command("bench.cli:main", "time and memory beside PyTorch's attention and other libraries", "bench"),
}

# What each extra brings, by the names that Python imports: asked for before a command starts, not in the middle of it.
EXTRAS: dict[str | None, tuple[str, ...]] = {
    "hf": ("transformers",),
    "lab": ("numpy", "plotly", "rich", "safetensors"),
    "plot": ("matplotlib",),
    "explorer": ("gradio", "matplotlib", "plotly"),
    "bench": ("matplotlib", "psutil", "rich"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `posenc ARGV`; the exit status: 0 done, 1 failed, 2 asked for something that cannot be."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    terminal.prepare()
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone (posenc list | head): nobody is left to tell, and closing must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


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
        return fail(f"no command {name!r}{hint}; the commands are {', '.join(COMMANDS)}")
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
    module, function = target.split(":")
    return getattr(importlib.import_module(f"posenc.{module}"), function)(arguments)


def fail(sentence: str) -> int:
    """Say what is wrong on the error stream; the exit status for it."""
    print(f"posenc: {sentence}", file=sys.stderr)
    return 2


def usage() -> str:
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
        lines += ["", dim("[name] is the extra that a command needs: pip install 'posenc[name]'")]
    return "\n".join(lines)
