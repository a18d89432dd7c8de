"""posenc list and posenc show: encodings described from the registry and their source text, without importing torch."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import documentation
from ..core.errors import OptionError
from ..encodings import spec
from ..encodings.registry import ENCODINGS, OWN_ATTENTION, SIZES, EncodingInfo, find_card
from . import pictures, terminal

if TYPE_CHECKING:
    from ..encodings.rope.scaling import Scaling

SCALING = "posenc.encodings.rope.scaling"
ORIGINAL = 4096  # the training length that an extension is shown for, if none is given

LIST_HELP = """usage  posenc list

A table of every encoding: family, where it applies, parameters, extrapolation, models that use it."""

SHOW_HELP = """usage  posenc show NAME[:OPTION=VALUE,...][+EXTENSION[:FACTOR]]

The formula, conventions and options of an encoding, and a picture of its effect over distance. NAME is a name of
posenc list or a class name, in any case. EXTENSION (linear, ntk, dynamic, yarn, llama3) extends rope, as in posenc compare.

  posenc show t5
  posenc show t5:buckets=16,max_distance=64,causal=true
  posenc show alibi:heads=12
  posenc show rope+yarn:8
  posenc show rope:head_dim=128+yarn:8,original=8192"""


def list_command(arguments: list[str]) -> int:
    if arguments:
        if arguments[0] not in ("-h", "--help"):
            raise OptionError(f"list takes no arguments, got {' '.join(arguments)!r}; try posenc show NAME")
        print(LIST_HELP)
        return 0
    header = ("name", "family", "enters", "parameters", "extrapolates", "used by")
    encodings, own = (
        terminal.table(header, [(c.name, c.family, c.enters, c.parameters, c.extrapolates, c.used_by) for c in cards.values()])
        for cards in (ENCODINGS, OWN_ATTENTION)
    )  # fmt: skip
    between = terminal.wrap("attention of its own, no encoding of a layer:", terminal.width())
    end = terminal.dim("\nposenc show NAME: formula, options and a picture")
    print(*encodings, "", *map(terminal.dim, between), *own, end, sep="\n")
    return 0


def show_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(SHOW_HELP)
        if not arguments:
            raise OptionError(f"show needs an encoding: {', '.join(ENCODINGS)}")
        return 0
    if len(arguments) > 1:
        raise OptionError(f"show takes one encoding at a time, got {' '.join(arguments)!r}")
    text = spec.normalise(arguments[0])
    spec.check(text, own_attention=True)
    encoding, extension = spec.split_extension(text)
    name, given = spec.parse_options(encoding)
    print("\n".join(page(find_card(name), given, extension)))
    return 0


def page(which: EncodingInfo, given: dict[str, Any], extension: str | None = None) -> list[str]:
    """The lines that `posenc show` prints."""
    source = read_source(which)
    known = [option.name for option in source.options]
    unknown = [option for option in given if option not in known and option not in SIZES]
    if unknown:
        options = f"its options are {', '.join(known)}" if known else "it has no options"
        raise OptionError(f"{which.name} has no option {', '.join(unknown)}; {options}")
    bold, dim = terminal.bold, terminal.dim
    lines = [f"{bold(which.name)}  {dim(which.public_name)}", "", f"  {which.formula}", ""]
    facts = {
        "family": which.family, "enters": which.enters, "parameters": which.parameters, "extrapolates": which.extrapolates,
        "used by": which.used_by,
    }  # fmt: skip
    if which.module.startswith("posenc."):
        facts["page"] = documentation.page_of(which.name)
    for label, text in facts.items():
        lines += terminal.hanging(f"{dim(label.ljust(12))}  ", text)
    lines += ["", *_prose(source.doc), ""]
    lines += _options(source.options)
    if extension is None:
        return [*lines, "", *_picture(which, source, given)]
    scaling = spec.make_extension(which.name, f"{which.name}+{extension}", extension, ORIGINAL)
    doc = ast.get_docstring(_definition(_module(SCALING), type(scaling).__name__) or ast.parse("")) or ""
    lines += ["", f"{bold(f'{which.name}+{extension}')}  {dim(f'posenc.scaling.{scaling}')}", "", *_prose(doc)]
    return [*lines, "", *_picture(which, source, given, scaling)]


def _picture(which: EncodingInfo, source: Source, given: dict[str, Any], scaling: Scaling | None = None) -> list[str]:
    options = pictures.Options({**source.defaults, **given})
    try:
        drawn = pictures.draw(which.name, options) if scaling is None else pictures.extended(options, scaling)
    except OptionError as error:
        raise OptionError(f"cannot draw {which.name}: {error}") from None
    except (ArithmeticError, ValueError):  # of Python's own arithmetic
        extreme = ", ".join(f"{name}={value}" for name, value in given.items()) or scaling
        raise OptionError(
            f"cannot draw {which.name}: with {extreme} its numbers leave the range of floating point; "
            "give values nearer to the defaults"
        ) from None
    unused = [option for option in given if option not in options.read]
    if unused:
        used = ", ".join(sorted(options.read)) or "nothing"
        raise OptionError(f"{', '.join(unused)} does not change the picture of {which.name}; it depends on {used}")
    return drawn


def _prose(doc: str) -> list[str]:
    """A docstring with its paragraphs wrapped to the terminal width; indented or aligned ones are kept as they are."""
    lines: list[str] = []
    for paragraph in doc.split("\n\n"):
        aligned = any(line.startswith(" ") or "  " in line for line in paragraph.splitlines())
        lines += ["", *(paragraph.splitlines() if aligned else terminal.wrap(paragraph, terminal.width()))]
    return lines[1:]


def _options(options: list[Option]) -> list[str]:
    if not options:
        return [terminal.bold("options") + "  none"]
    rows = [(o.name, o.annotation, o.default if o.default is not None else "required") for o in options]
    return terminal.table(("option", "type", "default"), rows, narrowest=7)


@dataclass(frozen=True)
class Option:
    name: str
    annotation: str
    default: str | None  # source text; None if the option is required


@dataclass(frozen=True)
class Source:
    doc: str
    options: list[Option]
    defaults: dict[str, Any]


def read_source(which: EncodingInfo) -> Source:
    """The docstring and options of a class, parsed from its file: importing it would import torch."""
    tree = _module(which.module)
    found = _definition(tree, which.class_name)
    if found is None:
        raise OptionError(f"posenc.{which.class_name} is not in {which.module}")
    options, defaults = [], {}
    for name, annotation, default in _arguments(tree, found):
        kind = ast.unparse(_spelled_out(tree, which.module, annotation)) if annotation else ""
        options.append(Option(name, kind, ast.unparse(default) if default else None))
        if default is not None:
            try:
                defaults[name] = ast.literal_eval(default)
            except ValueError:
                continue
    return Source(ast.get_docstring(found) or "", options, defaults)


def _module(name: str) -> ast.Module:
    found = importlib.util.find_spec(name)
    source = found.loader.get_source(name) if found and found.loader and hasattr(found.loader, "get_source") else None
    if source is None:
        raise OptionError(f"cannot show {name}: its source file is not installed")
    return ast.parse(source)


def _definition(tree: ast.Module | ast.ClassDef, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """The class or function of this name."""
    found = (node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)))
    return next((node for node in found if node.name == name), None)


def _spelled_out(tree: ast.Module, module: str, annotation: ast.expr) -> ast.expr:
    """Replace an alias of a Literal by the Literal, so that the choices are visible: Layout is Literal['half', ...]."""
    if not isinstance(annotation, ast.Name):
        return annotation
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == annotation.id:
            return node.value
        if isinstance(node, ast.ImportFrom) and node.level and annotation.id in {alias.name for alias in node.names}:
            source = ".".join([*module.split(".")[: -node.level], node.module or ""]).rstrip(".")
            return _spelled_out(_module(source), source, annotation)
    return annotation


Argument = tuple[str, ast.expr | None, ast.expr | None]
"""Name, annotation and default."""


def _arguments(tree: ast.Module, node: ast.ClassDef | ast.FunctionDef) -> list[Argument]:
    """The arguments of a function, or of the class's __init__, or of its nearest base in the same file."""
    if isinstance(node, ast.FunctionDef):
        given, plain = node.args, [one for one in node.args.args if one.arg != "self"]
        padded = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
        pairs = [*zip(plain, padded), *zip(given.kwonlyargs, given.kw_defaults)]
        return [(argument.arg, argument.annotation, default) for argument, default in pairs]
    found = _definition(node, "__init__")
    for base in node.bases:
        if found is None and isinstance(base, ast.Name):
            found = _definition(tree, base.id)
    return [] if found is None else _arguments(tree, found)
