"""Public names and their docstrings: which there are, and what a docstring must have."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from typing import Any

import torch

import posenc

from . import markdown

MODULES = ("contextual", "formulas", "hf", "index", "parallel", "plot", "rope", "scaling")
"""Public modules of posenc; what they define themselves is public, or what __all__ lists."""
SHAPE = re.compile(
    r"\[[^\]\n]*\b(?:[A-Z]\w*|heads|n|axes|rows|buckets|d_model|size|max_distance)\b[^\]\n]*\]|torch\.Size\("
)
WITHOUT_TENSORS = re.compile(r"posenc\.(?:create|info|list_encodings|register_\w+|\w*Error|\w*\.\w*Error|Unsupported\w+|ENGINES|hf\.(?!to_posenc)\w+"
                             r"|plot\.\w+|scaling\.\w+|formulas\.\w+|rope\.(?:by_layer|from_config|to_config)|parallel\.count_traffic"
                             r"|parallel\.ContextParallel|parallel\.reduce_gradients|Run|Grid|index\.(?:Grid|Sparse|exact)|Mask)$")  # fmt: skip
"""Names that neither take nor return tensors of a fixed shape."""


def public_names() -> dict[str, Any]:
    """{posenc.attend: the function, posenc.hf.extend: ..}: every public class and function."""
    found = {f"posenc.{name}": getattr(posenc, name) for name in posenc.__all__}
    for module in MODULES:
        own = getattr(posenc, module)
        names = getattr(own, "__all__", None) or [name for name in vars(own) if not name.startswith("_")]
        for name in names:
            one = getattr(own, name)
            home = getattr(one, "__module__", "")
            # a module without __all__ also has what it imports; the folder parallel collects its files' names
            if (
                "__all__" in vars(own)
                or home == own.__name__
                or (module == "parallel" and home.startswith(own.__name__))
            ):
                found[f"posenc.{module}.{name}"] = one
    return {
        name: one
        for name, one in found.items()
        if inspect.isclass(one) or (callable(one) and not inspect.ismodule(one))
    }


def faults_of(name: str, one: Any) -> list[str]:
    """What the docstring of a public name lacks: shapes, an example, what raises."""
    doc = inspect.getdoc(one) if not inspect.isclass(one) else inspect.cleandoc(one.__doc__ or "")
    if not doc:
        return [f"{name} has no docstring"]
    found = []
    if ">>> " not in doc:
        found.append(f"{name} has no example: write >>> lines that `python -m docs.site.reference` runs")
    if not re.search(r"\braise|\bRaise", doc) and not (inspect.isclass(one) and issubclass(one, Exception)):
        found.append(f"{name} does not say what raises")
    if not WITHOUT_TENSORS.match(name) and not SHAPE.search(doc):
        found.append(f"{name} names no shape, such as [B, H, L, D]")
    return found


def run_examples(name: str, one: Any) -> list[str]:
    """Run the >>> lines of a docstring; a sentence for each whose output is another."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(one) or "")
    test = doctest.DocTest(examples, {"posenc": posenc, "torch": torch}, name, None, 0, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    torch.manual_seed(0)
    hook = sys.excepthook  # a process group replaces it for good
    with markdown.registries_restored():
        runner.run(test, out=report.append)
    sys.excepthook = hook
    return [f"{name}: an example prints something else:\n{''.join(report)}"] if runner.failures else []


def faults() -> list[str]:
    """Every fault of every public name; examples are run."""
    found = []
    for name, one in public_names().items():
        found += faults_of(name, one) or run_examples(name, one)
    return found


if __name__ == "__main__":
    sentences = faults()
    print("\n".join(sentences) or f"{len(public_names())} names")
    sys.exit(bool(sentences))
