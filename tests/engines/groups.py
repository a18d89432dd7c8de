"""Groups of interpreted cases (triton_cases.py, triton_decode_cases.py): functions `group_*`, run in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posenc import engines
from tests import seeds


def list_groups(cases: Path, quick: set[str]) -> list:
    """Parameters of a test. The interpreter is slow: `make test` runs the quick groups only, and those in one process."""
    found = re.findall(r"^def group_(\w+)", cases.read_text(encoding="utf-8"), re.MULTILINE)
    together = ",".join(name for name in found if name in quick)
    return [together, *(pytest.param(name, marks=pytest.mark.slow) for name in found if name not in quick)]


def check_group(cases: Path, group: str, timeout: float) -> None:
    source = str(Path(engines.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(cases), group], capture_output=True, text=True, env=env, timeout=timeout)
    assert done.returncode == 0 and done.stdout.endswith("passed\n"), (done.stdout + done.stderr)[-3000:]


def run_group(functions: dict) -> None:
    """The groups that the command line names, on memory that is filled with NaN and watched."""
    from tests.engines import interpreter, triton_memory

    torch.set_num_threads(1)
    interpreter.mend()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name in sys.argv[1].split(","):
        seeds.everything(seeds.of(name))
        with triton_memory.watched():
            functions[f"group_{name}"]()
