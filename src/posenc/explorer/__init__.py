"""The explorer: a local web page to look at positional encodings (`posenc explore`; the extra `explorer`).

pages      gallery, compare, sentence, extend, results: one file each; `draw` is a pure function of a link
state      a link is a view: everything on a page is in its address
guard      who is answered: this server's own pages, on this machine
painter    asks the process that draws; worker is that process, with limits of time and memory
figures    panels of posenc.plot as Plotly figures
texts      every word, in English and Chinese
"""
