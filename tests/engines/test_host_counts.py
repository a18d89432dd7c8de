"""What the host does for a repeated call on a GPU (tests/gpu/host_counts.py), in numbers that a change must not raise unnoticed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PINNED = {
    # functions of this package, operations of PyTorch, allocations, launches
    "call/alibi/forward": (25, 0, 2, 1),
    "call/alibi/step": (30, 0, 6, 4),
    "call/t5/forward": (26, 1, 2, 2),
    "call/t5/step": (31, 1, 7, 6),
    "call/clipped/forward": (26, 0, 2, 2),
    "call/clipped/step": (31, 0, 7, 6),
    "call/shaw/forward": (28, 0, 2, 2),
    "call/shaw/step": (33, 0, 8, 9),
    "call/deberta/forward": (41, 2, 2, 6),
    "call/deberta/step": (63, 0, 9, 18),
    "call/transformer_xl/forward": (55, 3, 2, 5),
    "call/transformer_xl/step": (72, 2, 10, 15),
    "layer/alibi/token": (22, 16, 1, 1),
    "layer/alibi/forward": (17, 14, 1, 1),
    "layer/t5/token": (22, 16, 1, 1),
    "layer/t5/forward": (17, 14, 1, 1),
    "layer/clipped/token": (22, 16, 1, 1),
    "layer/clipped/forward": (17, 14, 1, 1),
    "layer/shaw/token": (22, 16, 2, 1),
    "layer/shaw/forward": (17, 14, 2, 1),
    "layer/transformer_xl/token": (65, 21, 2, 2),
    "layer/transformer_xl/forward": (52, 18, 2, 2),
    "layer/relative_logits/token": (32, 24, 2, 2),
    "layer/relative_logits/forward": (27, 22, 2, 2),
    "padded/none/forward": (31, 14, 1, 1),
    "padded/none/step": (37, 14, 6, 5),
    "padded/rope/forward": (47, 14, 3, 2),
    "padded/rope/step": (58, 14, 10, 7),
    "padded/alibi/forward": (30, 14, 1, 1),
    "padded/alibi/step": (40, 14, 6, 5),
    "padded/t5/forward": (32, 14, 1, 1),
    "padded/t5/step": (42, 15, 7, 7),
}
SLACK = 3
"""Functions and operations: releases of Python and PyTorch differ by a few. Launches are counted exactly."""


def test_the_host_work_of_repeated_calls():
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "KINETO_LOG_LEVEL": "6"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.host_counts"], capture_output=True, text=True, env=environment, timeout=300, cwd=root
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found.keys() == PINNED.keys()
    for name, (calls, operations, allocations, launches) in PINNED.items():
        now = found[name]
        assert now["calls"] <= calls + SLACK, f"{name}: {now}, {calls} calls are pinned"
        assert now["operations"] <= operations + SLACK, f"{name}: {now}, {operations} operations are pinned"
        assert now["allocations"] <= allocations, f"{name}: {now}, {allocations} allocations are pinned"
        assert now["launches"] <= launches, f"{name}: {now}, {launches} launches are pinned"
