"""What the explorer's tests share: the pages are built once, one server answers without a browser, one with."""

import pytest


@pytest.fixture(scope="session")
def built():
    """{language: {page: its components}}."""
    pytest.importorskip("gradio")
    from posenc.explorer import frame
    from posenc.explorer.texts import LANGUAGES

    return {language: frame.blocks(language)[1] for language in LANGUAGES}


@pytest.fixture(scope="session")
def client():
    """The application, asked without a socket."""
    pytest.importorskip("gradio")
    from starlette.testclient import TestClient

    from posenc.explorer import app

    with TestClient(app.make(), base_url="http://127.0.0.1") as made:
        yield made
