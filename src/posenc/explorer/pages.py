"""The pages by name. Nothing here needs gradio."""

from __future__ import annotations

from .compare import Compare
from .extend import Extend
from .gallery import Gallery
from .results import Results
from .sentence import Sentence
from .view import Page

PAGES: dict[str, Page] = {page.key: page for page in (Gallery(), Compare(), Sentence(), Extend(), Results())}
