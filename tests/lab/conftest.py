"""A comparison that takes a second, trained once and shared by the tests."""

import gc
import shutil

import pytest

from posenc.lab.presets import from_dict
from posenc.lab.run import compare

TINY = {
    "title": "tiny", "encodings": ["none", "learned", "alibi", "rope", "rope+ntk:8"], "seeds": 1, "batch": 4, "width": 16,
    "heads": 2, "layers": 1, "steps": 12, "count": 16,
    "tasks": [
        {"task": "previous", "train": 6, "test": [6, 12]},
        {"task": "text", "train": 16, "test": [16, 32], "count": 256, "sliding": 8, "windows": 4},
    ],
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def quick_collections():
    """Exclude what the test session has loaded from the garbage collection before each trial."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny():
    """from_dict of the tiny preset, with changes at the top and one or both tasks."""

    def make(tasks=("previous", "text"), **changes):
        content = {**TINY, **changes}
        content["tasks"] = [task for task in TINY["tasks"] if task["task"] in tasks]
        return from_dict(content, "tiny")

    return make


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, text, tiny):
    """A finished run with two seeds and a learning-rate check. Read only: tests that change a run use `run_copy`."""
    folder = tmp_path_factory.mktemp("run")
    compare(tiny(seeds=2, rates=[2.0]), folder, text=text, jobs=1)
    return folder


@pytest.fixture
def run_copy(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A small text to learn."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the cat sat on the mat and the dog sat on the log. " * 400)
    return path
