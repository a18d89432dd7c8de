"""The page about rotary positions runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "rotary.md"


def test_every_example_runs():
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(examples) == 4
    names: dict = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
