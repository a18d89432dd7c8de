"""The project's own files agree with one another."""

import re
import tomllib
from pathlib import Path

import posenc

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME = re.compile(r"^[A-Za-z0-9._-]+")


def test_the_core_needs_torch_alone():
    assert [NAME.match(d)[0] for d in PROJECT["project"]["dependencies"]] == ["torch"]


def test_the_version_has_one_source():
    assert "version" in PROJECT["project"]["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", posenc.__version__)


def test_every_dependency_of_an_extra_is_pinned_for_the_tests():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    for extra, dependencies in PROJECT["project"]["optional-dependencies"].items():
        for dependency in dependencies:
            name = NAME.match(dependency)[0].lower().replace("_", "-")
            assert name == "posenc" or name in pins, f"{name} of the extra {extra} is missing from constraints.txt"
    assert "torch==2.13.0" in lines
