"""The table of vision, speech and sink models, from the committed run."""

import json
from pathlib import Path

from posenc.hf import measure_families

PATH = Path(__file__).parents[2] / "bench" / "results" / "hf-families.json"


def test_the_table_has_every_measured_model():
    result = json.loads(PATH.read_text(encoding="utf-8"))
    table = measure_families.table(result)
    assert result["models"].keys() <= measure_families.MODELS.keys()
    assert table.count("→") == 2 * len(result["models"])
    assert all(one["error"] <= 1e-4 for one in result["models"].values())
