"""The explorer: a local web page to look at positional encodings (`posenc explore`; the extra `explorer`).

pages      gallery, compare, sentence, extend, results: one file each; `draw` is a pure function of a link
state      a link is a view: everything on a page is in its address
figures    panels of posenc.plot as Plotly figures
texts      every word, in English and Chinese
"""
