"""The tables of accelerated models, from the committed runs."""

import json
from pathlib import Path

import pytest
import torch

from posenc.bench import accelerated

ROOT = Path(__file__).parents[2] / "bench" / "results"


def load(name):
    return json.loads((ROOT / f"{name}.json").read_text(encoding="utf-8"))


def test_the_table_has_every_measured_model():
    for name in ("hf-families", "hf-families-amd"):
        result = load(name)
        table = accelerated.table(result)
        assert result["models"].keys() <= accelerated.MODELS.keys()
        assert table.count("→") == 2 * len(result["models"])
        assert all(one["error"] <= accelerated.ALLOWED for one in result["models"].values())


def test_every_model_was_measured_on_both_devices():
    on_cpu = load("hf-families")["models"].keys() | load("hf-families-amd")["models"].keys()
    assert on_cpu == load("hf-families-h200")["models"].keys() == accelerated.MODELS.keys()


def test_whole_models_were_measured_on_both_devices():
    names = [*load("hf-cpu")["models"], *load("hf-cuda")["models"]]
    assert names == list(accelerated.WHOLE)


def test_a_wrong_output_is_not_reported():
    right = torch.randn(50)
    assert accelerated._compare("x", right, right) == 0.0
    with pytest.raises(RuntimeError, match="nothing is reported"):
        accelerated._compare("x", right * (1 + 1e-3), right)


def test_results_of_another_machine_are_not_mixed(tmp_path, capsys):
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"machine": "another", "versions": {}, "models": {}}))
    with pytest.raises(SystemExit):
        accelerated.main(["--out", str(out), "--missing"])
    assert "measured with another machine and versions" in capsys.readouterr().err


def test_models_are_measured_side_by_side(tmp_path, monkeypatch):
    """A failure is reported, and the others are kept."""
    monkeypatch.setattr(accelerated, "measure", lambda name, times, threads: load("hf-families")["models"][name])
    first, second = list(load("hf-families")["models"])[:2]
    monkeypatch.setattr(
        accelerated, "attempt_all", lambda names, jobs, **options: iter([(first, "broken"), accelerated.attempt(second, **options)])
    )  # fmt: skip
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="1 of 2 models failed"):
        accelerated.main(["--out", str(out), "--models", first, second])
    assert list(json.loads(out.read_text(encoding="utf-8"))["models"]) == [second]
