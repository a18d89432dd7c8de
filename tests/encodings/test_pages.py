"""The pages of docs/encodings: their code runs, their links lead somewhere, and every new family has one."""

import re
from pathlib import Path

import pytest

import posenc

FOLDER = Path(__file__).parents[2] / "docs" / "encodings"
PAGES = sorted(FOLDER.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_runs_and_links_lead_somewhere(page):
    text, names = page.read_text(encoding="utf-8"), {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (FOLDER / target).exists(), target


def test_every_name_of_the_overview_exists():
    names = set(posenc.list_encodings()) | {f"posenc.{name}" for name in posenc.__all__}
    names |= {"posenc.contextual", "posenc.rope.by_layer", "posenc.to_flex", "LatentAttention"}
    for name in re.findall(r"`([\w.]+)`", (FOLDER / "README.md").read_text(encoding="utf-8")):
        assert name in names, name
