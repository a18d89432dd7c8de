"""What gets installed is what is in the folder: a data file that a wheel forgets is found by users only."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    pytest.importorskip("setuptools", "77", reason="building a wheel needs setuptools 77 or newer")
    copy = tmp_path / "copy"
    copy.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git clone")
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('wheel')"]
    (copy / "wheel").mkdir()
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (wheel,) = (copy / "wheel").glob("posenc-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {
        name.removeprefix("src/") for name in tracked.stdout.split("\0") if name.startswith("src/posenc/")
    }
