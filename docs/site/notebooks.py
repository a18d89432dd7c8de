"""The three notebooks: docs/notebooks/NAME.py in cells, run for the site and written as .ipynb beside the page.

A cell starts with `# %%` (code) or `# %% [markdown]`. Notebooks are kept as Python files: they read, diff and lint like code.
A cell of text has both languages, separated by a line `---`.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

FOLDER = Path(__file__).parents[1] / "notebooks"
CELL = re.compile(r"^# %%(?: \[(markdown)\])?\n", re.MULTILINE)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def notebook(name: str, language: str) -> nbformat.NotebookNode:
    """The notebook of a Python file, not yet run."""
    parts = CELL.split((FOLDER / f"{name}.py").read_text(encoding="utf-8"))[1:]
    cells = []
    for kind, source in zip(parts[::2], parts[1::2], strict=True):
        if kind == "markdown":
            text = "\n".join(re.sub("^# ?", "", line) for line in source.strip().splitlines())
            both = re.split(r"^---$", text, flags=re.MULTILINE)
            assert len(both) == 2, f"{name}: a cell of text needs English, a line ---, and Chinese"
            cells.append(nbformat.v4.new_markdown_cell(both[language == "zh"].strip()))
        else:
            cells.append(nbformat.v4.new_code_cell(source.strip()))
    first = next(cell for cell in cells if cell.cell_type == "code")
    first.source = f"%matplotlib inline\n{first.source}"  # figures as pictures, in every notebook program
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # random ids would change the file at every build
    return nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})


def run(made: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run every cell; an error in one raises."""
    client = NotebookClient(made, timeout=300, kernel_name="python3", record_timing=False)
    client.create_kernel_manager()
    client.km.transport = "ipc"  # nothing listens on a port
    client.execute()
    return made


def pages(language: str, out: Path, results: dict[str, nbformat.NotebookNode], *, execute: bool = True) -> None:
    """Markdown pages with outputs and pictures, and the .ipynb files. `results` keeps what has run: code is the same."""
    folder = out / language / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        made = notebook(name, language)
        if name not in results:
            results[name] = run(notebook(name, "en")) if execute else notebook(name, "en")
        for cell, done in zip(made.cells, results[name].cells, strict=True):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = done.outputs, done.execution_count
        nbformat.write(made, folder / f"{name}.ipynb")
        text, extra = MarkdownExporter().from_notebook_node(made, resources={"output_files_dir": f"{name}_files"})
        for file, data in extra["outputs"].items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        words = {"en": "Download this notebook", "zh": "下载这个笔记本"}[language]
        (folder / f"{name}.md").write_text(f"{text}\n\n[{words}]({name}.ipynb)\n", encoding="utf-8")
