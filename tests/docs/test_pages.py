"""The hand-written pages: their code runs and prints what they show, both languages are in step, figures and names exist."""

import re
from pathlib import Path

import matplotlib
import pytest

pytest.importorskip("griffe", reason="needs the extra docs")

from docs.site import assemble, encodings, figures, markdown, tables
from posenc.encodings import registry
from posenc.encodings.registry import ENCODINGS
from posenc.engines import choose

ROOT = Path(__file__).parents[2]
ENGLISH = assemble.handwritten("en")
DOCUMENTS = [
    "guides/rotary.md", "results/lab.md", "results/claims.md", "results/benchmarks-full.md", "project/design.md",
    "project/contributing.md", "project/changelog.md", "project/security.md", "project/exam.md", "project/triton-log.md",
]  # fmt: skip
"""Documents of the repository that the English site includes; in Chinese a text of its own, or an introduction."""


def text(language, page):
    return (ROOT / "docs" / language / page).read_text(encoding="utf-8")


@pytest.fixture
def restored():
    """What a page registers is gone after it."""
    held = (registry.ENCODINGS, registry.ENCODINGS_BY_CLASS, registry.CAUSAL, registry._REGISTERED, choose.ENGINES)
    before = [dict(table) for table in held]
    yield
    for table, entries in zip(held, before, strict=True):
        table.clear()
        table.update(entries)


WITH_CODE = [page for page in ENGLISH if markdown.code_blocks(text("en", page))]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_prints_what_the_page_shows(page, restored):
    matplotlib.use("agg")
    for block, printed in markdown.run_blocks(ROOT / "docs" / "en" / page):
        assert printed == (block.output or ""), f"python -m docs.site.markdown docs/en/{page} writes the new output"


def test_every_chapter_has_all_of_its_parts():
    chapters = [page for page in ENGLISH if re.match(r"course/\d", page)]
    assert len(chapters) == 12
    for page in chapters:
        for language, wanted in (
            ("en", ["The idea", "See it", "Run it", "Exercises", "Sources"]),
            ("zh", ["想法", "看一看", "动手运行", "习题", "出处"]),
        ):
            chapter = text(language, page)
            titles = [title for _, title in markdown.headings(chapter)]
            assert [title for title in titles if title in wanted] == wanted, (language, page)
            assert "](figure:" in chapter and '??? success "' in chapter and "arXiv:" in chapter
            assert any("models" in title or "真实模型" in title for title in titles) or "12-" in page


def test_every_page_is_translated():
    chinese = set(assemble.handwritten("zh"))
    assert chinese == set(ENGLISH)


@pytest.mark.parametrize("page", sorted(set(ENGLISH) - set(DOCUMENTS)))
def test_the_languages_are_in_step(page):
    """The same code, formulas, figures, tables and headings, in the same order; text may differ in length only."""
    english, chinese = text("en", page), text("zh", page)
    count = len(markdown.code_blocks(english))
    assert re.findall(r"\{\{ code (\d+) \}\}", chinese) == [str(n + 1) for n in range(count)]
    assert not markdown.code_blocks(chinese), "code stands in the English page; write {{ code n }}"
    formulas = len(re.findall(r"\{\{ formula \d+ \}\}", chinese)) + len(markdown.formulas(chinese))
    assert formulas == len(markdown.formulas(english))
    for mark in (r"\]\(figure:([\w-]+)\)", r"\{\{ ((?:table|value|api|classes|names) [^}]+) \}\}", r"arXiv:([\d.]+\d)"):
        assert re.findall(mark, english) == re.findall(mark, chinese), mark
    assert [level for level, _ in markdown.headings(english)] == [level for level, _ in markdown.headings(chinese)]
    links = r"\]\(((?!figure:)[^)#]+)"
    found, others = (sorted(re.findall(links, markdown.FENCE.sub("", one))) for one in (english, chinese))
    assert found == others


def test_every_encoding_has_a_page_in_both_languages():
    for language in assemble.LANGUAGES:
        for name, page in encodings.pages(language).items():
            assert page.startswith(f"# {Path(name).stem}\n")
            assert page.count("\n## ") == 7, f"{language}: {name}"
    for name in ENCODINGS:
        own = [len(encodings.handwritten(name, language)) for language in assemble.LANGUAGES]
        assert min(own) > 60


def test_markers_are_known():
    for language in assemble.LANGUAGES:
        for page in assemble.handwritten(language):
            found = text(language, page)
            for kind, argument in assemble.MARKER.findall(found):
                if kind == "table":
                    assert argument in tables.TABLES
                if kind == "value":
                    assert re.fullmatch(r"\d+\.\d+", tables.value(argument))
            drawn = re.findall(r"\]\(figure:([\w.-]+)\)", found)
            assert set(drawn) <= set(figures.names()), page


def test_a_figure_is_drawn(tmp_path):
    figures.draw("rope-decay", tmp_path / "rope-decay.svg")
    assert "<svg" in (tmp_path / "rope-decay.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="unknown figure 'nothing'; there are order-lost"):
        figures.draw("nothing", tmp_path / "nothing.svg")


PRIVATE = re.compile(r"\b(amidst|softened|seen by|told to|speaks|scheme|schemes)\b")


@pytest.mark.parametrize("page", [page for page in ENGLISH if page not in DOCUMENTS])
def test_the_words_are_those_of_the_field(page):
    assert not PRIVATE.findall(text("en", page))


def test_chinese_lines_are_joined_without_a_space():
    assert assemble.join_lines("位置，\n编码\n\n下一段") == "位置，编码\n\n下一段"
    assert assemble.join_lines("位置 posenc\n编码\n- 项目") == "位置 posenc\n编码\n- 项目"
