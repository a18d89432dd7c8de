"""Run code whose kernels Triton interprets, in a process of its own: Triton reads the setting when it is imported."""

import os
import subprocess
import sys


def run_interpreted(code: str) -> None:
    path = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=1800,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
