"""A comparison that takes a second."""

import pytest

from posenc.lab.presets import from_dict

TINY = {
    "title": "tiny", "schemes": ["none", "learned", "alibi", "rope", "rope+ntk:8"], "seeds": 1, "batch": 4, "width": 16,
    "heads": 2, "layers": 1, "steps": 12, "count": 16,
    "tasks": [
        {"task": "previous", "train": 6, "test": [6, 12]},
        {"task": "text", "train": 16, "test": [16, 32], "count": 256, "sliding": 8, "windows": 4},
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_settings():
    return TINY


@pytest.fixture
def tiny():
    """from_dict of the tiny preset, with changes at the top and one or both tasks."""

    def make(tasks=("previous", "text"), **changes):
        content = {**TINY, **changes}
        content["tasks"] = [task for task in TINY["tasks"] if task["task"] in tasks]
        return from_dict(content, "tiny")

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A small text to learn."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the cat sat on the mat and the dog sat on the log. " * 400)
    return path
