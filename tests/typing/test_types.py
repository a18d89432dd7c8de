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
SCRIPTS = [HERE / "user_script.py", HERE / "public_api.py"]
BOTH = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def check(command, *scripts):
    env = {**os.environ, "MYPYPATH": str(SOURCE), "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-m", *command, *map(str, scripts)],
        capture_output=True,
        text=True,
        env=env,
        timeout=600,
        cwd=HERE,
    )


def mypy(*scripts):
    pytest.importorskip("mypy")
    kept = HERE.parents[1] / ".mypy_cache" / "user_script"
    return check(["mypy", "--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={kept}"], *scripts)


@BOTH
def test_the_script_runs(script):
    runpy.run_path(str(script))


def test_the_scripts_use_every_public_name():
    text = "\n".join(script.read_text(encoding="utf-8") for script in SCRIPTS)
    imported = {
        a.name
        for script in SCRIPTS
        for n in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    public = {*posenc.__all__, *posenc._MODULES} - {"engines", "encodings", "nn"}  # packages without names of their own
    assert not [name for name in public if f"posenc.{name}" not in text and name not in imported]
    assert not [
        name
        for name in posenc.hf.__all__
        if f"posenc.hf.{name}" not in text and not name.startswith(("from_", "Unsupported"))
    ]


@pytest.mark.slow  # mypy reads torch anew in a new environment: a minute. `make types` runs it
def test_mypy_accepts_a_user_s_scripts():
    done = mypy(*SCRIPTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_finds_a_user_s_mistakes(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import posenc\n\nposenc.Atention\nposenc.RoPE(head_dim=8, layout='halves')\nposenc.hf.acelerate\n"
    )
    done = mypy(wrong)
    assert 'no attribute "Atention"' in done.stdout
    assert '"layout" to "RoPE" has incompatible type' in done.stdout
    assert 'no attribute "acelerate"' in done.stdout


def pyright(script):
    """An optional tool: its package fetches a program for node when it first runs."""
    if find_spec("pyright") is None:
        pytest.skip("needs the package pyright")
    version = check(["pyright"], "--version")
    if version.returncode != 0:
        pytest.skip(f"pyright does not start: {version.stderr.strip()[-200:]}")
    return check(["pyright", "--pythonpath", sys.executable], script)


@pytest.mark.slow  # as those of mypy: `make types` runs them
@BOTH
def test_pyright_accepts_a_user_s_script(script):
    done = pyright(script)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright_finds_a_user_s_mistakes(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        f"import sys\n\nsys.path.append({str(SOURCE)!r})\nimport posenc\n\nposenc.Atention\n"
        "posenc.RoPE(head_dim=8, layout='halves')\nposenc.Attention(8, 2)(1)\n"
    )
    done = pyright(wrong)
    assert '"Atention" is not a known attribute' in done.stdout
    assert "halves" in done.stdout
    assert '"Literal[1]" is not assignable to "Tensor"' in done.stdout


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
