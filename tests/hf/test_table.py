"""docs/hf-families.md is that of the harness."""

from pathlib import Path

from tests.hf.cases import EVERY
from tests.hf.harness import checks_of

PAGE = Path(__file__).parents[2] / "docs" / "hf-families.md"


def test_every_case_has_its_row():
    rows = [line.split(" | ") for line in PAGE.read_text().split("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    checks = {row[0].removeprefix("| "): row[2] for row in rows}
    assert {name: checks.get(name) for name in EVERY} == {
        name: ", ".join(checks_of(case)) for name, case in EVERY.items()
    }
    assert checks.keys() - EVERY.keys() <= {"parakeet", "inkling2", "nemotron_asr_streaming", "unlimited_ocr"}, (
        "cases of a newer transformers"
    )
