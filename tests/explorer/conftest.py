"""Shared fixtures: the built pages, a client without a socket, and a small run of the lab."""

from dataclasses import asdict

import pytest


@pytest.fixture(scope="session")
def built():
    """{language: {page key: PageLayout}}."""
    pytest.importorskip("gradio")
    from posenc.explorer import layout
    from posenc.explorer.texts import LANGUAGES

    return {language: layout.build_blocks(language)[1] for language in LANGUAGES}


@pytest.fixture(scope="session")
def client():
    """A client of the application, without a socket."""
    pytest.importorskip("gradio")
    from starlette.testclient import TestClient

    from posenc.explorer import server

    with TestClient(server.create_app(), base_url="http://127.0.0.1") as made:
        yield made


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The folder of a finished run in the lab's own format: copy, two encodings, two seeds, without a report."""
    from posenc.lab.presets import from_dict
    from posenc.lab.results import Results

    task = {"task": "copy", "encodings": ["alibi", "rope"], "train": 16, "test": [16, 32], "steps": 1, "lr": 0.001}
    rows = [
        {"task": "copy", "encoding": encoding, "seed": seed, "lr": 0.001, "size": size, "accuracy": value + seed / 10}
        for encoding, value in (("alibi", 0.4), ("rope", 0.2))
        for size in (16, 32)
        for seed in (0, 1)
    ]
    folder = tmp_path_factory.mktemp("lab") / "tiny"
    folder.mkdir()
    run = Results(asdict(from_dict({"tasks": [task]}, "tiny")), {}, [], rows, 4, 4)
    (folder / "results.json").write_bytes(run.as_json())
    return folder
