"""The import rules of DESIGN.md: by reading the source, and in fresh processes where the effect is what counts."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "posenc"
HEAVY = {"triton", "transformers", "matplotlib", "gradio", "plotly", "rich", "ray", "safetensors", "typer", "pandas"}

APPLICATIONS = {"hf", "timm", "lab", "explorer", "plot", "bench"}
MAY_IMPORT = {
    "core": {"core"},
    "encodings": {"core", "encodings"},
    "engines": {"core", "engines"},
    "functional": {"core", "engines"},
    "flex": {"core", "engines", "functional"},
    "contextual": {"core", "engines", "functional", "contextual"},
    "parallel": {"core", "functional", "parallel"},
    "nn": {"core", "encodings", "functional", "parallel", "nn"},
    "cli": {"__init__", "core", "encodings", "cli"},
    **{
        name: {"__init__", "core", "encodings", "functional", "contextual", "parallel", "nn", "cli"} | APPLICATIONS
        for name in sorted(APPLICATIONS)
    },
}
"""What each folder of posenc may import of posenc; `__init__` is the public API."""
EXCEPTIONS = {
    ("cli/rope_diff.py", "plot"),  # inside the function that draws a figure
    ("cli/plot.py", "plot"),  # the same
}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path


def imports(path):
    """Absolute names of what a file imports at any depth; `from a import b` gives a.b. Annotations' imports count too."""
    package = [SOURCE.name, *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, node.module] if node.module else base)
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def part_of(name):
    """The folder (or file) of posenc that an absolute name belongs to; None: it is not posenc's."""
    parts = name.split(".")
    if parts[0] != SOURCE.name:
        return None
    if len(parts) > 1 and ((SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").exists()):
        return parts[1]
    return "__init__"  # a public name


def test_the_folders_are_those_of_the_rules():
    folders = {name.split("/")[0].removesuffix(".py") for name, _ in modules()}
    assert folders == {*MAY_IMPORT, "__init__", "__main__"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_each_folder_imports_what_it_may(folder):
    for name, path in modules():
        if name.split("/")[0].removesuffix(".py") == folder:
            for target in imports(path):
                part = part_of(target)
                allowed = part is None or part in MAY_IMPORT[folder] or (name, part) in EXCEPTIONS
                assert allowed, f"{name} imports {target}; {folder} may import {sorted(MAY_IMPORT[folder])}"


@pytest.mark.parametrize("application", sorted(APPLICATIONS))
def test_an_application_uses_no_inside_of_an_engine(application):
    """Nor by way of `posenc.engines`, which a rule about imports would miss."""
    for name, path in modules():
        if name.startswith(f"{application}/"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                inside = isinstance(node, ast.Attribute) and node.attr == "engines"
                assert not (inside and isinstance(node.value, ast.Name) and node.value.id == "posenc"), name


def test_no_engine_names_an_encoding():
    """N encodings + M engines: an engine that knows an encoding's name has begun to be N × M."""
    from posenc.encodings.registry import ENCODINGS_BY_CLASS

    for path in (SOURCE / "engines").rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {node.id for node in tree if isinstance(node, ast.Name)}
        assert not names & set(ENCODINGS_BY_CLASS), path


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


def packages(loaded):
    return {name.split(".")[0] for name in loaded}


def test_import_posenc_loads_a_handful_of_modules_and_no_torch():
    before, after = modules_after("pass", "import posenc")
    own = {name for name in after if name.split(".")[0] == "posenc"}
    assert not packages(after) & {"torch", "numpy", *HEAVY}
    assert len(own) <= 8, own
    assert len(after - before) <= 60, sorted(after - before)  # the standard library's: dataclasses, inspect, ...


def test_the_first_public_name_brings_torch_and_little_else():
    """Counted, not timed: a clock fails on a busy machine. Beyond torch's own there are posenc's few modules."""
    torch, used = modules_after("import torch", "import posenc; posenc.Attention(8, 2, encoding='rope')")
    assert not (packages(used) & HEAVY) - packages(torch)
    beyond = {name for name in used - torch if name.split(".")[0] != "torch"}
    own = {name for name in beyond if name.split(".")[0] == "posenc"}
    assert not {name for name in own if name.split(".")[1:2] and name.split(".")[1] in APPLICATIONS | {"cli"}}
    assert len(own) <= 80, sorted(own)
    assert len(beyond - own) <= 40, sorted(beyond - own)
    assert len(used - torch) <= 0.15 * len(torch)


def test_an_encoding_is_loaded_alone():
    """A name brings its own family's file, not the others, and no engine."""
    (used,) = modules_after("import posenc; posenc.create('t5', heads=2)")
    encodings = {name for name in used if name.startswith("posenc.encodings.")}
    assert encodings <= {"posenc.encodings.bias", "posenc.encodings.registry"}
    assert not {name for name in used if name.startswith(("posenc.engines", "posenc.functional", "posenc.nn"))}


@pytest.mark.parametrize("command", ["main", "show", "pictures", "terminal"])
def test_the_command_line_loads_no_torch(command):
    (used,) = modules_after(f"import posenc.cli.{command}")
    assert not packages(used) & {"torch", *HEAVY}


def test_the_applications_are_named_by_the_command_line_and_loaded_when_called():
    (used,) = modules_after("from posenc.cli.main import main; main(['list'])")
    assert not {name for name in used if name.startswith(tuple(f"posenc.{name}" for name in APPLICATIONS))}
    assert not packages(used) & {"torch", *HEAVY}
