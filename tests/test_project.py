"""The project's own files agree with one another and with the code."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import posenc
from posenc.encodings.registry import ENCODINGS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME = re.compile(r"^[A-Za-z0-9._-]+")
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


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


def test_a_file_is_one_idea():
    long = {path: n for path in ROOT.glob("src/**/*.py") if (n := len(path.read_bytes().splitlines())) > 600}
    assert not long


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_first_screen_is_what_it_is_and_two_commands(text):
    first = blocks(text, "")[0].splitlines()
    assert [line.split("#")[0].strip() for line in first] == ["make demo", "make test"]
    assert text.index("make test") < 1200


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_the_examples_run(text):
    """The three uses, one after another, as a reader would paste them."""
    examples = blocks(text, "python")
    assert len(examples) == 3
    names: dict = {}
    for example in examples:
        assert len(example.strip().splitlines()) <= 6
        exec(compile(example, "README", "exec"), names)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_a_readme_is_one_screen(text):
    """At most 900 words; a Chinese word is about two characters."""
    chinese = len(re.findall(r"[\u4e00-\u9fff]", text))
    assert len(re.sub(r"[\u4e00-\u9fff]+", " ", text).split()) + chinese / 2 <= 900


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_every_encoding_has_a_row(text):
    """Encodings with the same facts share one."""
    table = text.partition("<!-- encodings:start -->")[2].partition("<!-- encodings:end -->")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.strip().splitlines()[2:]]
    assert sorted(name for row in rows for name in row) == sorted(ENCODINGS), "run: make bench-table"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_extra_has_a_row_in_the_page_on_installing(language):
    page = (ROOT / "docs" / language / "start" / "install.md").read_text(encoding="utf-8")
    for name in PROJECT["project"]["optional-dependencies"]:
        assert f"\n| `{name}` |" in page


def test_the_two_readmes_are_in_step():
    def code(text):
        return [re.sub(r"#.*", "", block) for block in blocks(text, "python")]

    assert code(ENGLISH) == code(CHINESE)
    for mark in (r"^#+ ", r"^\| ", r"^```", r"<!--.*?-->", r"\[[^\]]*\]\([^)]*\)"):
        english, chinese = (len(re.findall(mark, text, re.MULTILINE)) for text in (ENGLISH, CHINESE))
        assert english == chinese, f"{mark}: {english} in English, {chinese} in Chinese"


DOCUMENTS = [
    "README.md", "README.zh-CN.md", "CONTRIBUTING.md", "DESIGN.md", "docs/rotary.md", "docs/triton-log.md", "docs/exam.md",
    "SECURITY.md", "CHANGELOG.md",
]  # fmt: skip
CODE = "core|encodings|engines|nn|cli|hf|lab|explorer|plot"
"""Folders of the package, which documents name without src/posenc; bench/ is also a folder of results."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"
    paths = re.findall(r"`((?:src|tests|bench|examples|docs)/[\w./-]+)`", text)
    paths += [f"src/posenc/{path}" for path in re.findall(rf"`((?:{CODE})/[\w./-]+)`", text)]
    for path in paths:
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_the_makefile_names_files_that_exist():
    paths = re.findall(r"(?<![\w./-])(?:src|tests|docs)/[\w./*-]+", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(paths) > 5
    assert not [path for path in paths if not list(ROOT.glob(path))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_to_sections_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for target, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        headings = re.findall(r"^#+ (.*)$", ((ROOT / name).parent / target).read_text(encoding="utf-8"), re.MULTILINE)
        found = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert section in found, f"{name} links to {target}#{section}"


PRIVATE = re.compile(
    r"\b(amid|amidst|softened|told|blind|speaks|(?<!color-)schemes?|at a glance|the long way|the way back|make one a multiple|"
    r"earns? (it )?back|few_rows|turns? differently)\b"
)
"""Words that the code used to have instead of those of the field."""


@pytest.mark.parametrize("path", ["src/posenc", "DESIGN.md", "CONTRIBUTING.md"])
def test_the_words_are_those_of_the_field(path):
    found = []
    for file in [ROOT / path] if path.endswith(".md") else sorted((ROOT / path).rglob("*.py")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{file.relative_to(ROOT)}:{number}: {line.strip()}"] if PRIVATE.search(line) else []
    assert not found, "say it in the words of the glossary: " + "; ".join(found)


def definitions(path):
    """Every function, class and method of a file: "attend", "Attention", "Attention.forward"."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))


def test_the_walks_of_the_design_name_functions_that_exist():
    walks = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "DESIGN.md").read_text(encoding="utf-8"))
    assert len(walks) > 30
    for file, name in walks:
        assert name in definitions(ROOT / "src" / "posenc" / file), f"DESIGN.md names {file}:{name}"


WALKS = {
    "Training a T5 layer": """
layer = posenc.Attention(32, 2, encoding="t5")
with recorded():
    layer(torch.randn(1, 2048, 32)).sum().backward()
""",
    "A RoPE decoding step": """
layer, cache = posenc.Attention(32, 2, encoding="rope", causal=True), posenc.KVCache()
x = torch.randn(1, 5, 32)
with torch.no_grad():
    layer(x[:, :4], cache=cache)
    with recorded():
        layer(x[:, 4:], cache=cache)
""",
    "DeBERTa's backward": """
layer = posenc.Attention(32, 2, encoding=posenc.DeBERTa(d_model=32, heads=2, max_distance=2), engine="triton")
out = layer(torch.randn(1, 8, 32))
with recorded():
    out.sum().backward()
""",
}
RECORDER = """
import json, sys
from contextlib import contextmanager
import posenc, torch
torch.set_num_threads(1)
calls, source = [], posenc.__path__[0]
def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(source):
        call = (frame.f_code.co_filename, frame.f_code.co_qualname)
        if not calls or calls[-1] != call:
            calls.append(call)
@contextmanager
def recorded():
    sys.setprofile(note)
    yield
    sys.setprofile(None)
"""


@pytest.mark.parametrize("walk", [pytest.param(walk, marks=[pytest.mark.slow] * ("DeBERTa" in walk)) for walk in WALKS])
def test_the_walks_of_the_design_are_the_calls_in_their_order(walk):
    """In fresh processes: nothing is cached, and Triton's interpreter stands for the GPU."""
    if "DeBERTa" in walk:
        pytest.importorskip("triton")
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", text[text.index(f"**{walk}") :].split("\n\n")[1])
    assert len(steps) > 9
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1" if "DeBERTa" in walk else "0"}
    code = f"{RECORDER}{WALKS[walk]}print(json.dumps(calls))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    source = str(ROOT / "src" / "posenc") + os.sep
    calls = iter([(file.removeprefix(source), name) for file, name in json.loads(done.stdout)])
    for step in steps:
        assert step in calls, f"{walk}: {':'.join(step)} is not called after the steps before it"


def modules_of_the_tree():
    """Folder -> the words of its lines in DESIGN's tree."""
    listing = blocks((ROOT / "DESIGN.md").read_text(encoding="utf-8"), "")
    tree = next(block for block in listing if block.startswith("posenc/"))
    found, folder = {}, ""
    for line in tree.splitlines()[1:]:
        named = re.match(r"(  |    )([\w./]+)", line)
        if named and named[2].endswith("/"):
            folder = named[2].rstrip("/") if len(named[1]) == 2 else f"{folder.split('/')[0]}/{named[2].rstrip('/')}"
        elif named:
            folder = ""
        found.setdefault(folder, set()).update(re.findall(r"\w+", line))
    return found


def test_every_module_is_in_the_tree_of_the_design():
    source, tree = ROOT / "src" / "posenc", modules_of_the_tree()
    applications = {"hf", "lab", "explorer", "plot", "bench"}
    missing = []
    for path in sorted(source.rglob("*.py")):
        folder, name = path.parent.relative_to(source).as_posix(), path.stem
        if name.startswith("__") or folder == "." or folder.split("/")[0] in applications:
            continue
        missing += [] if name in tree.get(folder, ()) else [f"{folder}/{name}.py"]
    assert not missing, f"name these modules in the tree of DESIGN.md: {missing}"
    assert applications | {"functional", "flex", "timm"} <= set().union(*tree.values())


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "docs/lab.md", "bench/results/README.md"])
def test_the_readmes_generated_parts_are_those_of_registry_and_results(name):
    pytest.importorskip("griffe", reason="needs the extra docs")
    from docs.site import readme

    assert readme.rewritten(name) == (ROOT / name).read_text(encoding="utf-8"), "run: make bench-table"


def test_the_citation_has_the_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {posenc.__version__}\n" in text
    assert f"\n## {posenc.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
