"""The table of accelerated models, from the committed runs."""

import json
from pathlib import Path

import pytest

from posenc.hf import measure

ROOT = Path(__file__).parents[2]
CPU, LONG, CUDA = (
    json.loads((ROOT / "bench" / "results" / f"hf-{run}.json").read_text()) for run in ("cpu", "cpu-longt5", "cuda")
)


def test_the_table_has_every_model():
    table = measure.table([CPU, LONG, CUDA])
    assert table.count("\n| ") > 8 and "T5-base" in table and "training step" in table
    assert "训练一步" in measure.table([CPU, LONG, CUDA], train="训练一步", forward="前向")


def test_every_model_and_way_is_there():
    assert set(LONG["models"]) == set(measure.KNOWN) - set(measure.MODELS)
    for result, models in ((CPU, measure.MODELS), (CUDA, measure.KNOWN)):
        assert set(result["models"]) == set(models)
        text = "\n".join(measure.describe(name, one) for name, one in result["models"].items())
        assert text.count("original / accelerated") == len(models)
        assert ("triton" if result["device"] == "cuda" else "sdpa") in text


def test_a_wrong_output_is_not_reported():
    import torch

    right = torch.randn(50)
    assert measure._compare("x", right, right) == 0.0
    with pytest.raises(RuntimeError, match="nothing is reported"):
        measure._compare("x", right * (1 + 1e-3), right)
