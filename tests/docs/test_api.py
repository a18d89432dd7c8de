"""Every public name has a docstring and stands on a page of the API reference."""

import inspect
import re
from pathlib import Path

import matplotlib
import pytest

pytest.importorskip("griffe", reason="needs the extra docs")

import posenc
from docs.site import assemble, docstrings, encodings, reference

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


NAMES = reference.public_names()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_shapes_an_example_that_runs_and_what_raises(name):
    matplotlib.use("agg")
    assert reference.faults_of(name, NAMES[name]) == []
    assert reference.run_examples(name, NAMES[name]) == []


def test_every_public_name_is_checked():
    assert {f"posenc.{name}" for name in posenc.__all__} - {"posenc.ENGINES"} <= set(NAMES)
    assert {"posenc.hf.extend", "posenc.parallel.attend", "posenc.scaling.YaRN", "posenc.contextual.cope"} <= set(NAMES)
    modules = {name for name, target in posenc._MODULES.items() if target not in ("engines", "encodings", "nn")}
    assert modules == set(reference.MODULES)


def undocumented(x): ...


def without_example(x):
    """x [B, L]. Raises ValueError."""


def without_shapes(x):
    """Raises ValueError.

    >>> 1 + 1
    2
    """


def without_errors(x):
    """x [B, L].

    >>> 1 + 1
    2
    """


def with_wrong_output(x):
    """x [B, L]. Raises ValueError.

    >>> 1 + 1
    3
    """


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (undocumented, "no docstring"), (without_example, "no example"), (without_shapes, "no shape"),
        (without_errors, "what raises"),
    ],
)  # fmt: skip
def test_a_docstring_that_lacks_something_is_found(one, fault):
    (found,) = reference.faults_of("posenc.one", one)
    assert fault in found


def test_an_example_with_another_output_is_found():
    assert reference.faults_of("posenc.one", with_wrong_output) == []
    (found,) = reference.run_examples("posenc.one", with_wrong_output)
    assert "Expected:\n    3\nGot:\n    2" in found


def test_the_reference_is_complete():
    assert {f"posenc.{name}" for name in posenc.__all__} <= REFERENCED | set(assemble.unlisted_names())
    assert "{{ names rest }}" in (PAGES / "functions.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["layers", "functions", "plans"])
def test_every_name_of_a_page_has_an_example_before_it(page):
    parts = re.split(r"\{\{ api ([\w.]+) \}\}", (PAGES / f"{page}.md").read_text(encoding="utf-8"))
    for before, name in zip(parts[::2], parts[1::2]):
        assert "```python" in before, f"{name} has no example"


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_has_a_place_in_the_reference(name):
    assert name in REFERENCED


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
        """One line with [B, L] where a < b.

            s = q·k
            second line

        name     what it is, a*b
                 and more
        other    `x | y`
        """
    )
    assert shown == (
        "One line with \\[B, L\\] where a &lt; b.\n\n```text\ns = q·k\nsecond line\n```\n\n"
        "| | |\n| --- | --- |\n| `name` | what it is, a\\*b and more |\n| `other` | `x \\| y` |"
    )
