"""The import rules of DESIGN.md, each in a fresh process, and by reading the source where no process can tell."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "posenc"
HEAVY = {"triton", "transformers", "matplotlib", "gradio", "plotly", "rich", "ray", "safetensors", "typer", "pandas"}


def fresh(code):
    """What a fresh interpreter prints after running the code, read as JSON."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules_after(*steps):
    """The modules that are loaded after each of the steps, taken one after another in a fresh process."""
    taken = "".join(f"{step}; found.append(sorted(sys.modules)); " for step in steps)
    return [set(names) for names in fresh(f"import json, sys; found = []; {taken} print(json.dumps(found))")]


def test_import_posenc_is_light_and_touching_a_name_brings_torch_and_nothing_heavier():
    light, torch, used = (
        {name.split(".")[0] for name in loaded}
        for loaded in modules_after("import posenc", "import torch", "posenc.Attention(8, 2, encoding='t5')")
    )
    assert not light & {"torch", *HEAVY}
    assert "torch" in torch and "posenc" in used
    assert not (used & HEAVY) - torch


def test_what_both_sides_share_imports_neither_and_schemes_import_no_engine():
    shared = ("plan", "where", "index", "rotation", "mask", "constants", "formulas", "errors", "encoding", "registry")
    encodings = sorted(path.stem for path in (SOURCE / "encodings").glob("*.py") if path.stem != "__init__")
    assert "bias" in encodings
    first, then = modules_after(
        "; ".join(f"import posenc.{name}" for name in shared),
        "; ".join(f"import posenc.encodings.{name}" for name in encodings),
    )
    assert not {m for m in first if m.startswith(("posenc.engines.", "posenc.encodings.", "posenc.functional"))}
    forbidden = {
        "posenc.functional",
        "posenc.nn.attention",
        "posenc.hf",
        "posenc.lab",
        "posenc.explorer",
        "posenc.cli.main",
    }
    assert not {m for m in then if m.startswith("posenc.engines") or m in forbidden}


def engine_modules():
    found = (path.relative_to(SOURCE.parent).with_suffix("") for path in (SOURCE / "engines").rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in found)


@pytest.mark.parametrize("module", engine_modules())
def test_engines_import_no_scheme(module):
    """Read, not run: an engine may need a library that this machine has not."""
    path = SOURCE.parent / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for name in imported(path, module, path.name == "__init__.py"):
        assert not name.startswith(
            ("posenc.encodings", "posenc.core.encoding", "posenc.encodings.registry", "posenc.nn.attention")
        ), name
        assert not name.startswith(("posenc.hf", "posenc.lab", "posenc.explorer", "posenc.cli.main")), name


def test_no_engine_names_a_scheme():
    """N encodings + M engines: an engine that knows an encoding's name has begun to be N × M."""
    from posenc.encodings.registry import ENCODINGS_BY_CLASS

    for path in (SOURCE / "engines").rglob("*.py"):
        names = {
            node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)
        }
        assert not names & set(ENCODINGS_BY_CLASS), path


APPLICATIONS = ("hf", "lab", "explorer", "plot", "bench", "rope_diff")


def test_the_core_imports_no_application_and_no_application_an_engine():
    """Read, not run: applications need their extras. The command line names them as text and loads one when asked."""
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        application = parts[1] in APPLICATIONS
        forbidden = ("posenc.engines.",) if application else tuple(f"posenc.{name}" for name in APPLICATIONS)
        package = parts[-1] == "__init__"
        for name in imported(path, ".".join(parts[:-1] if package else parts), package):
            assert not name.startswith(forbidden), f"{'/'.join(parts)} imports {name}"


@pytest.mark.slow
def test_import_time_is_torch_s():
    """import posenc and touching its attention: under 1.5 × the time of import torch, best of three, same conditions."""
    clock = "import json, time; start = time.perf_counter(); {}; print(json.dumps(time.perf_counter() - start))"
    plain, ours = [], []
    for _ in range(3):
        plain.append(fresh(clock.format("import torch")))
        ours.append(fresh(clock.format("import posenc; posenc.Attention(8, 2, encoding='rope')")))
    assert min(ours) < 1.5 * min(plain), f"{min(ours):.2f} s against torch's {min(plain):.2f} s"


def imported(path, module, package):
    """Absolute names of everything that a file imports when it runs, at any depth: not what type checkers alone read."""
    parts = module.split(".") if package else module.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield prefix
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
