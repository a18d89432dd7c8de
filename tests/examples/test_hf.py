"""The three scripts of examples/ run offline and show what they promise."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return script


def test_speed_up_t5(run):
    out = run("speed_up_t5.py", "--length", "64")
    assert "6 attention layers run on posenc" in out
    assert "same text: True" in out
    assert float(re.search(r"largest difference (\S+),", out)[1]) < 1e-5


def test_finetune_deberta(run):
    losses = [float(x) for x in re.findall(r"loss (\S+)", run("finetune_deberta.py", "--length", "96"))]
    assert losses[-1] < losses[0] - 0.05


def test_extend_llama(run):
    out = run("extend_llama.py")
    assert "64 -> 256 tokens" in out
    assert float(re.search(r"of the logits (\S+)", out)[1]) < 1e-5
