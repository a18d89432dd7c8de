"""What a release installs is what is in the folder, and it runs without the folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone")
    return [name for name in filter(None, listed.stdout.split("\0")) if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def release(tracked, tmp_path_factory):
    """(sdist, wheel), made by `python -m build` from the tracked files alone: the wheel is built from the sdist."""
    pytest.importorskip("build", reason="needs the extra dev")
    pytest.importorskip("setuptools", "77", reason="building a wheel needs setuptools 77 or newer")
    copy = tmp_path_factory.mktemp("release")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (copy / "dist").glob("posenc-*.tar.gz")
    (wheel,) = (copy / "dist").glob("posenc-*.whl")
    return sdist, wheel


def test_the_wheel_holds_every_file_of_the_package(release, tracked):
    packed = {name for name in zipfile.ZipFile(release[1]).namelist() if ".dist-info/" not in name}
    assert packed == {name.removeprefix("src/") for name in tracked if name.startswith("src/posenc/")}


def test_the_sdist_holds_the_package_and_its_licence(release, tracked):
    with tarfile.open(release[0]) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {name for name in tracked if name.startswith("src/posenc/")} <= packed
    assert {"LICENSE", "README.md", "pyproject.toml"} <= packed


def test_the_wheel_describes_itself(release):
    with zipfile.ZipFile(release[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    for line in (
        "Name: posenc",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        "Project-URL: Documentation",
    ):
        assert line in metadata
    assert "Provides-Extra: docs" in metadata


RUN = """
import posenc, sys
assert posenc.__file__.startswith(sys.argv[1]), posenc.__file__
import torch
from posenc.cli.main import main
assert main(["list"]) == 0 and main(["show", "t5"]) == 0
from posenc.lab import presets
assert presets.load("quick").tasks
posenc.plot.save(posenc.plot.overview("t5"), "t5.png")
layer = posenc.Attention(32, 2, encoding="rope", causal=True)
assert layer(torch.randn(1, 5, 32)).shape == (1, 5, 32)
from posenc.explorer import server
from posenc.explorer.pages import PAGES
from posenc.explorer.texts import LANGUAGES
server.create_app()
for number in ("2", "12"):
    learn = PAGES["learn"]
    assert learn.draw(learn.complete({"chapter": number}), LANGUAGES["zh"]).figures
print("ran")
"""


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_release_runs_without_the_repository(release, tmp_path, kind):
    """In an environment of its own, which borrows the dependencies but not this repository's editable install."""
    environment, target = tmp_path / "env", tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    quietly = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", target]
    archive = release[kind == "wheel"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quietly, archive], check=True, capture_output=True)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    paths = os.pathsep.join([str(target), sysconfig.get_paths()["purelib"]])  # .pth files there are not read
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [python, "-c", RUN, str(target)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("ran\n"), done.stdout[-500:] + done.stderr
    assert (tmp_path / "t5.png").stat().st_size > 10_000
