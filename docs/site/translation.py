"""Whether every page exists in both languages, and whether the two are in step."""

from __future__ import annotations

import re

from . import assemble, markdown

MARKS = {
    "figures": r"\]\(figure:([\w-]+)\)",
    "tables, numbers and names of the API": r"\{\{ ((?:table|value|api|classes|names|include) [^}]+) \}\}",
    "papers": r"arXiv:([\d.]+\d)",
}


def untranslated() -> list[str]:
    """A sentence for each page that one language lacks."""
    pages = {language: set(assemble.handwritten(language)) for language in assemble.LANGUAGES}
    found = []
    for language, others in (("zh", "en"), ("en", "zh")):
        found += [f"docs/{language}/{page} is missing: translate docs/{others}/{page}"
                  for page in sorted(pages[others] - pages[language])]  # fmt: skip
    return found


def compare(english: str, chinese: str) -> list[str]:
    """What two texts of one page do not have in common: headings, code, formulas, figures, tables, papers, links, items."""
    found = []
    count = len(markdown.code_blocks(english))
    if re.findall(r"\{\{ code (\d+) \}\}", chinese) != [str(n + 1) for n in range(count)]:
        found.append(
            f"the English page has {count} code blocks; the Chinese one must show each with {{{{ code n }}}}, in order"
        )
    if markdown.code_blocks(chinese):
        found.append("code stands in the English page; write {{ code n }} in the Chinese one")
    formulas = len(re.findall(r"\{\{ formula \d+ \}\}", chinese)) + len(markdown.formulas(chinese))
    if formulas != len(markdown.formulas(english)):
        found.append(f"{len(markdown.formulas(english))} formulas in English, {formulas} in Chinese")
    for what, mark in MARKS.items():
        if re.findall(mark, english) != re.findall(mark, chinese):
            found.append(f"{what}: {re.findall(mark, english)} in English, {re.findall(mark, chinese)} in Chinese")
    levels = [[level for level, _ in markdown.headings(text)] for text in (english, chinese)]
    if levels[0] != levels[1]:
        found.append(f"headings: levels {levels[0]} in English, {levels[1]} in Chinese")
    plain = [markdown.FENCE.sub("", text) for text in (english, chinese)]
    links = [sorted(re.findall(r"\]\(((?!figure:)[^)#]+)", text)) for text in plain]
    if links[0] != links[1]:
        found.append(f"links: {links[0]} in English, {links[1]} in Chinese")
    for what, mark in (("rows of tables", r"^\|"), ("items of lists", r"^ *(?:[-*]|\d+\.) ")):
        counts = [len(re.findall(mark, text, re.MULTILINE)) for text in plain]
        if counts[0] != counts[1]:
            found.append(f"{what}: {counts[0]} in English, {counts[1]} in Chinese")
    return found


def compare_document(english: str, chinese: str) -> list[str]:
    """A document of the repository and its Chinese page: the same headings, and as many tables and blocks of code."""
    found = []
    levels = [[level for level, _ in markdown.headings(text)] for text in (english, chinese)]
    if levels[0] != levels[1]:
        found.append(f"headings: levels {levels[0]} in English, {levels[1]} in Chinese")
    counts = [len(markdown.parts(text)) for text in (english, chinese)]
    if counts[0] != counts[1]:
        found.append(
            f"tables and blocks of code: {counts[0]} in English, {counts[1]} in Chinese; {{{{ part DOCUMENT n }}}} shows one"
        )
    return found


def faults_of(page: str) -> list[str]:
    """What the Chinese page of an English one lacks."""
    english, chinese = ((assemble.DOCS / language / page).read_text(encoding="utf-8") for language in ("en", "zh"))
    if assemble.INCLUDE.search(english):
        return compare_document(_with_documents(english), _with_documents(chinese))
    return compare(english, chinese)


def _with_documents(text: str) -> str:
    text = assemble.INCLUDE.sub(lambda m: assemble.body(m[1].strip()), text)
    return re.sub(r"(?<!`)\{\{ part ([^}]+) \}\}", lambda m: assemble.part(m[1].strip()), text)


def faults() -> list[str]:
    """A sentence for each page without translation and for each difference of two languages of a page."""
    missing = untranslated()
    pages = set(assemble.handwritten("en")) & set(assemble.handwritten("zh"))
    return missing + [f"{page}: {fault}" for page in sorted(pages) for fault in faults_of(page)]
