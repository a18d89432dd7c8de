"""CONTRIBUTING's two recipes, executed as written: files outside the package, in a fresh process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import posenc
from posenc.encodings import registry

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(BLOCK.findall(TEXT))


def test_every_python_block_is_one_of_the_files():
    assert TEXT.count("```python") == len(FILES)
    assert list(FILES) == ["near.py", "use_near.py", "dense_engine.py", "use_dense_engine.py"]


@pytest.mark.parametrize("script", ["use_near.py", "use_dense_engine.py"])
def test_the_recipe_runs(script, tmp_path):
    """Warnings are errors, as in the other tests."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def restored():
    """What a test registers is gone after it."""
    tables = (registry.ENCODINGS, registry.ENCODINGS_BY_CLASS, registry.CAUSAL, registry._REGISTERED)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


class OneSided(posenc.Encoding):
    def __init__(self, *, heads: int, causal: bool = False):
        super().__init__()
        self.heads, self.causal = heads, causal


def test_a_registered_encoding_is_known_everywhere(restored):
    posenc.register_encoding("one_sided", OneSided, enters="nowhere", causal_options={"causal": True})
    assert posenc.list_encodings()[-1] == "one_sided"
    assert posenc.info("one_sided").load() is OneSided
    assert posenc.info("one_sided").enters == "nowhere"
    assert posenc.info("one_sided").module == __name__
    assert not posenc.create("one_sided", d_model=8, heads=2).causal
    assert posenc.Attention(8, 2, encoding="one_sided", causal=True).encoding.causal
    with pytest.raises(posenc.OptionError, match="one_sided has no option 'width'; its options are causal"):
        posenc.create("one_sided", heads=2, width=3)


def test_a_list_in_this_process_has_a_registered_encoding(restored, capsys):
    from posenc.cli.main import main

    posenc.register_encoding("one_sided", OneSided, used_by="this test")
    assert main(["list"]) == 0
    assert "one_sided" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("t5", OneSided), ValueError, "'t5' or the class name 'OneSided' is taken"),
        (("mine", posenc.T5), ValueError, "class name 'T5' is taken"),
        (("one sided", OneSided), ValueError, "must be an identifier, got 'one sided'"),
        (("one_sided", OneSided(heads=2)), TypeError, "must be a subclass of posenc.Encoding"),
        (("one_sided", dict), TypeError, "must be a subclass of posenc.Encoding"),
    ],
)
def test_what_cannot_be_registered_is_named(restored, arguments, error, words):
    with pytest.raises(error, match=words):
        posenc.register_encoding(*arguments)
    assert "one_sided" not in posenc.list_encodings()
