"""The pages of the explorer by key. Importing them does not import gradio."""

from __future__ import annotations

from .base import Page
from .compare import Compare
from .extend import Extend
from .gallery import Gallery
from .learn import Learn
from .results import Results
from .sentence import Sentence

PAGES: dict[str, Page] = {page.key: page for page in (Gallery(), Learn(), Compare(), Sentence(), Extend(), Results())}
