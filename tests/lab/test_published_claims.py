"""The claims of FIRE's paper in the documentation stand beside the committed run's numbers, in both languages."""

import re
from pathlib import Path

import pytest

from posenc.lab import evidence

ROOT = Path(__file__).parents[2]
PAGES = {"en": "docs/lab.md", "zh": "docs/zh/results/lab.md"}


def measured(encoding, size):
    results, task = evidence.strongest_text()
    return results.point(task, encoding, size, "loss").value


@pytest.mark.parametrize("language", PAGES)
def test_fires_claims_stand_beside_the_runs_losses(language):
    text = (ROOT / PAGES[language]).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    (without,) = [row for row in rows if "NoPE" in row]
    (biases,) = [row for row in rows if re.search(r"T5.*ALiBi.*KERPLE.*\d\.\d{3}", row)]
    for line, others in ((without, ("none", "rope")), (biases, ("t5", "alibi", "kerple"))):
        expected = [f"{measured(encoding, size):.3f}" for size in (512, 1024, 2048) for encoding in ("fire", *others)]
        assert re.findall(r"\d\.\d{3}", line) == expected
    assert f"{measured('fire', 2048) - measured('kerple', 2048):.3f}" in text
    for other in ("t5", "alibi", "kerple"):
        assert measured("fire", 1024) > measured(other, 1024)
    assert "2.28" in text
    assert "SCROLLS" in text
