"""The hand-written pages: their code runs and prints what they show, both languages are in step, figures and names exist."""

import re
from pathlib import Path

import matplotlib
import pytest

pytest.importorskip("griffe", reason="needs the extra docs")

from docs.site import assemble, encodings, figures, markdown, tables, translation
from posenc.encodings.registry import ENCODINGS, OWN_ATTENTION

ROOT = Path(__file__).parents[2]
ENGLISH = assemble.handwritten("en")


def text(language, page):
    return (ROOT / "docs" / language / page).read_text(encoding="utf-8")


WITH_CODE = [page for page in ENGLISH if markdown.code_blocks(text("en", page))]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_prints_what_the_page_shows(page):
    matplotlib.use("agg")
    assert markdown.output_faults(ROOT / "docs" / "en" / page) == []


def test_changed_output_and_code_that_fails_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    (fault,) = markdown.output_faults(page)
    assert "prints\n2\n" in fault and "shows\n3\n" in fault
    assert markdown.fill_output(page) and markdown.output_faults(page) == []
    page.write_text("```python\nprint(missing)\n```\n")
    assert "NameError" in markdown.output_faults(page)[0]


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
    assert translation.untranslated() == []


def test_a_page_without_translation_is_found(monkeypatch):
    pages = {"en": ["a.md", "b.md"], "zh": ["a.md", "c.md"]}
    monkeypatch.setattr(assemble, "handwritten", lambda language: pages[language])
    assert [fault.split(":")[0] for fault in translation.untranslated()] == [
        "docs/zh/b.md is missing",
        "docs/en/c.md is missing",
    ]


@pytest.mark.parametrize("page", ENGLISH)
def test_the_languages_are_in_step(page):
    """The same code, formulas, figures, tables, lists and headings, in the same order; text may differ in length only."""
    assert translation.faults_of(page) == []


@pytest.mark.parametrize(
    ("english", "chinese", "fault"),
    [
        ("## A\n\ntext\n", "text\n", "headings"),
        ("```python\nx\n```\n", "text\n", "1 code blocks"),
        ("```python\nx\n```\n", "```python\nx\n```\n", "stands in the English page"),
        ("$$\nx\n$$\n", "text\n", "1 formulas"),
        ("![a](figure:rope-decay)\n", "text\n", "figures"),
        ("{{ table lab-quick }}\n", "{{ table lab-paper }}\n", "tables"),
        ("arXiv:1706.03762\n", "arXiv:1706.03763\n", "papers"),
        ("[a](b.md)\n", "text\n", "links"),
        ("- one\n- two\n", "- one\n", "items of lists: 2 in English, 1 in Chinese"),
        ("| a |\n", "text\n", "rows of tables"),
    ],
)
def test_a_page_out_of_step_is_found(english, chinese, fault):
    assert any(fault in one for one in translation.compare(english, chinese))
    assert translation.compare(english, english.replace("```python\nx\n```", "x")) == [] or "```" in english


def test_the_claims_have_the_same_numbers_in_both_languages():
    """The English page is written by posenc claims, the Chinese one by hand."""
    english, chinese = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), text("zh", "results/claims.md")
    english, chinese = (one.split("\n## ")[0] for one in (english, chinese))  # what follows is one table for both
    rows = [
        [re.findall(r"\d+(?:\.\d+|e-\d+)?", row) for row in re.findall(r"^\|.*", one, re.MULTILINE)[2:]]
        for one in (english, chinese)
    ]
    assert len(rows[0]) == len(rows[1]) >= 10
    for number, (ours, theirs) in enumerate(zip(*rows, strict=True)):
        assert sorted(ours) == sorted(theirs), number


def test_a_document_out_of_step_is_found():
    english = "# A\n\n## B\n\n| a |\n"
    assert translation.compare_document(english, "# 一\n\n## 二\n\n| 甲 |\n") == []
    assert "headings" in translation.compare_document(english, "# 一\n\n| 甲 |\n")[0]
    assert "tables and blocks" in translation.compare_document(english, "# 一\n\n## 二\n")[0]


def test_every_encoding_has_a_page_in_both_languages():
    for language in assemble.LANGUAGES:
        for name, page in encodings.pages(language).items():
            assert page.startswith(f"# {Path(name).stem}\n")
            assert page.count("\n## ") == 9, f"{language}: {name}"
            wanted = ["Weights", "Pitfalls"] if language == "en" else ["权重", "易错之处"]
            assert all(f"\n## {title}\n" in page for title in wanted), f"{language}: {name}"
    for name in (*ENCODINGS, *OWN_ATTENTION):
        own = [len(encodings.handwritten(name, language)) for language in assemble.LANGUAGES]
        assert min(own) > 60


def test_markers_are_known():
    for language in assemble.LANGUAGES:
        for page in assemble.handwritten(language):
            found = text(language, page)
            for kind, argument in assemble.MARKER.findall(found):
                if kind == "table":
                    assert argument in {**tables.TABLES, **tables.LISTS}
                if kind == "value":
                    assert re.fullmatch(r"\d+\.\d+", tables.value(argument))
            drawn = re.findall(r"\]\(figure:([\w.-]+)\)", found)
            assert set(drawn) <= set(figures.names()), page


@pytest.mark.parametrize("name", tables.TABLES)
@pytest.mark.parametrize("language", assemble.LANGUAGES)
def test_a_table_has_a_head_and_rows_of_one_width(name, language):
    rows = [line for line in tables.table(name, language).splitlines() if line.startswith("|")]
    assert re.fullmatch(r"(\| --- )+\|", rows[1]) and len(rows) > 2
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_a_figure_is_drawn(tmp_path):
    figures.draw("rope-decay", tmp_path / "rope-decay.svg")
    assert "<svg" in (tmp_path / "rope-decay.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="unknown figure 'nothing'; there are order-lost"):
        figures.draw("nothing", tmp_path / "nothing.svg")


PRIVATE = re.compile(r"\b(amidst|softened|seen by|told to|speaks|scheme|schemes)\b")


@pytest.mark.parametrize("page", ENGLISH)
def test_the_words_are_those_of_the_field(page):
    assert not PRIVATE.findall(text("en", page))


def test_chinese_lines_are_joined_without_a_space():
    assert assemble.join_lines("位置，\n编码\n\n下一段") == "位置，编码\n\n下一段"
    assert assemble.join_lines("位置 posenc\n编码\n- 项目") == "位置 posenc\n编码\n- 项目"
