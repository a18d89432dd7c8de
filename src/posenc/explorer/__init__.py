"""The explorer: a local web application about positional encodings (`posenc explore`; the extra `explorer`).

    browser (page.js)  --POST /draw-->  server  -->  render_queue  --pipe-->  render_worker  -->  render  -->  pages

cli              posenc explore: picks a port, starts the server, opens the browser
server           HTTP routes; access refuses requests of other origins
layout           the Gradio controls around the figures
pages/           gallery, learn, compare, sentence, extend, results: `draw` is a pure function of the page's state
url_state        a page's state as a URL query, so a link restores a view
render           a state as JSON: Plotly figures (plotly_figures), text, code, link
render_queue     the server's side of the drawing process; render_worker is that process, with time and memory limits
cancellation     ends a drawing between two of its parts
texts            every text, in English and Chinese
"""
