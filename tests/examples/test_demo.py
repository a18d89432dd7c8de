"""The demo runs, and says what is known: without positions order cannot be learned, with a relative bias it can."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_tells_order_from_no_order(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--out", tmp_path, "--schemes", "none", "learned", "shaw"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.split("─")[-1]
    trained = {name: int(share) for name, share in re.findall(r"^(\w+) +(\d+)%", table, re.MULTILINE)}
    assert trained["none"] < 50
    assert trained["shaw"] > 95
    assert "learned positions end at max_len=32" in table
    assert ElementTree.parse(tmp_path / "demo.svg").getroot().tag.endswith("svg")
    assert [path.name for path in tmp_path.iterdir()] == ["demo.svg"]
