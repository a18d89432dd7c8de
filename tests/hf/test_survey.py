"""Every model of transformers is read: no folder has a positional term inside attention that the survey does not know."""

from pathlib import Path

import pytest
import transformers

from posenc.hf.family import FOLDERS
from tests.hf import survey


def test_every_term_is_listed():
    unknown = survey.find_terms() - set(FOLDERS) - set(survey.TERMS)
    assert not unknown, f"read these models and list them in tests.hf.survey: {sorted(unknown)}"


def test_nothing_is_listed_twice():
    assert not set(FOLDERS) & set(survey.TERMS)


def test_the_page_is_the_surveys():
    page = (Path(__file__).parents[2] / "docs" / "hf-survey.md").read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " not in page:
        pytest.skip("the page is of another release")
    assert page == survey.page(), "python -m tests.hf.survey > docs/hf-survey.md"
