"""Every public name has a docstring and stands on a page of the API reference."""

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the extra docs")

import posenc
from docs.site import assemble, docstrings, encodings

PAGES = Path(__file__).parents[2] / "docs" / "en" / "api"
MODULES = {
    "posenc.hf": posenc.hf, "posenc.plot": posenc.plot, "posenc.encodings.rope.scaling": posenc.scaling,
    "posenc.encodings.rope.convert": posenc.rope, "posenc.core.formulas": posenc.formulas, "posenc.core.index": posenc.index,
}  # fmt: skip
REFERENCED = {
    name
    for page in PAGES.glob("*.md")
    for name in re.findall(r"\{\{ api ([\w.]+) \}\}", page.read_text(encoding="utf-8"))
} | {f"posenc.{name}" for name in encodings.classes()}


@pytest.mark.parametrize("name", posenc.__all__)
def test_a_public_name_is_documented(name):
    found = getattr(posenc, name)
    if inspect.isclass(found) or inspect.isfunction(found):
        assert found.__doc__ and len(found.__doc__) > 15, f"posenc.{name} has no docstring"


def test_the_reference_is_complete():
    assert {f"posenc.{name}" for name in posenc.__all__} <= REFERENCED | set(assemble.unlisted_names())
    assert "{{ names rest }}" in (PAGES / "functions.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["layers", "functions", "plans"])
def test_every_name_of_a_page_has_an_example_before_it(page):
    parts = re.split(r"\{\{ api ([\w.]+) \}\}", (PAGES / f"{page}.md").read_text(encoding="utf-8"))
    for before, name in zip(parts[::2], parts[1::2]):
        assert "```python" in before, f"{name} has no example"


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_is_documented(name):
    module = MODULES[name]
    assert name in REFERENCED
    listed = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    for one in listed:
        found = getattr(module, one)
        if (inspect.isclass(found) or inspect.isfunction(found)) and found.__module__.startswith("posenc"):
            assert found.__doc__, f"{name}.{one} has no docstring"


def test_methods_are_documented():
    """Public methods that a class defines itself; those of nn.Module and overrides of documented ones aside."""
    missing = []
    for name in posenc.__all__:
        cls = getattr(posenc, name)
        if not inspect.isclass(cls):
            continue
        for method, found in vars(cls).items():
            if inspect.isfunction(found) and not method.startswith("_") and not inspect.getdoc(getattr(cls, method)):
                missing.append(f"posenc.{name}.{method}")
    assert sorted(set(missing) - {m for m in missing if m.endswith((".reset_parameters", ".reset_host"))}) == []


def test_docstrings_become_markdown():
    shown = docstrings.show(
        """One line with [B, L].

            s = q·k
            second line

        name     what it is, a*b
                 and more
        other    `x | y`
        """
    )
    assert shown == (
        "One line with \\[B, L\\].\n\n```text\ns = q·k\nsecond line\n```\n\n"
        "| | |\n| --- | --- |\n| `name` | what it is, a\\*b and more |\n| `other` | `x \\| y` |"
    )
