"""Builds the documentation site: `make docs`, `make docs-serve`.

    assemble.py    writes the pages of both languages to out/docs: markers are replaced, generated pages are added
    markdown.py    reads pages: code blocks, formulas, headings; runs code blocks and compares what they print
    figures.py     name -> figure, drawn by posenc when a page refers to it
    tables.py      name -> table or number, read from the committed results
    encodings.py   a page for each encoding of the registry
    plots.py       interactive plots of the benchmarks
    check.py       links and anchors of the built site, and requests to other machines

`python -m docs.site` assembles and runs MkDocs; mkdocs.yml has the navigation.
"""
