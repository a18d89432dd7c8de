"""Builds the documentation site: `make docs`, `make docs-serve`.

    assemble.py    writes the pages of both languages to out/docs: markers are replaced, generated pages are added
    markdown.py    reads pages: code blocks, formulas, headings; runs code blocks and compares what they print
    figures.py     name -> figure, drawn by posenc when a page refers to it
    tables.py      name -> table or number, read from the committed results
    encodings.py   a page for each encoding of the registry
    notebooks.py   runs docs/notebooks and makes pages and .ipynb files of them
    plots.py       interactive plots of the benchmarks
    docstrings.py  docstrings as Markdown
    reference.py   checks docstrings of public names and runs their examples
    translation.py checks that both languages have every page, in step
    check.py       checks links and anchors of the built site, and that nothing is loaded from other machines
    readme.py      the generated parts of the two READMEs and of docs/lab.md

`python -m docs.site` assembles and runs MkDocs; mkdocs.yml has the navigation.
"""
