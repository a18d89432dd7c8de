"""Types reach the user: checkers accept a user's script, and read the same names that the package loads lazily."""

import ast
import os
import runpy
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest

import posenc
import posenc.hf
from posenc.encodings import registry

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
SCRIPT = HERE / "user_script.py"


def check(command, script=SCRIPT):
    env = {**os.environ, "MYPYPATH": str(SOURCE), "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-m", *command, str(script)], capture_output=True, text=True, env=env, timeout=600, cwd=HERE
    )


def mypy(script):
    pytest.importorskip("mypy")
    kept = HERE.parents[1] / ".mypy_cache" / "user_script"  # torch takes half a minute to read anew
    return check(["mypy", "--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={kept}"], script)


def test_the_script_runs():
    runpy.run_path(str(SCRIPT))


def test_mypy_accepts_a_user_s_script():
    done = mypy(SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_a_user_s_mistakes(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import posenc\n\nposenc.Atention\nposenc.RoPE(head_dim=8, layout='halves')\nposenc.hf.acelerate\n"
    )
    done = mypy(wrong)
    assert 'no attribute "Atention"' in done.stdout
    assert '"layout" to "RoPE" has incompatible type' in done.stdout
    assert 'no attribute "acelerate"' in done.stdout


@pytest.mark.skipif(find_spec("pyright") is None, reason="needs the package pyright, which needs node")
def test_pyright_accepts_a_user_s_script():
    done = check(["pyright"])
    assert done.returncode == 0, done.stdout + done.stderr


def typed_names(module):
    """What a file binds under `if TYPE_CHECKING:`."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    imported = {
        a.asname or a.name for block in blocks for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names
    }
    assigned = {t.id for block in blocks for n in block.body if isinstance(n, ast.Assign) for t in n.targets}
    return {name for name in imported | assigned if not name.startswith("_")}


def test_checkers_and_lazy_loading_know_the_same_names():
    assert typed_names(posenc) == {*posenc._NAMES, *posenc._MODULES, *posenc._CLASSES}
    assert typed_names(posenc.hf) == set(posenc.hf._NAMES)


def test_create_has_an_overload_for_every_encoding():
    found = {}
    for overload in typing.get_overloads(registry.create):
        name, result = overload.__annotations__["name"], overload.__annotations__["return"]
        found[name.removeprefix("Literal['").removesuffix("']")] = result
    assert found == {name: one.class_name for name, one in registry.ENCODINGS.items()} | {"str": "Encoding"}
