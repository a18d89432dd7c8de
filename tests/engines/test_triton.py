"""The triton engine without a GPU: the reasons of `supports`, and interpreted kernels (triton_cases.py)."""

import dataclasses
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from posenc import Lookup, UnsupportedPlan, attend, engines
from posenc.engines.choose import ENGINES
from tests.engines.groups import check_group, list_groups
from tests.plans import plan_of, tensors

CASES = Path(__file__).with_name("triton_cases.py")
QUICK = {"documents", "watch", "empty", "replay", "decay", "first"}
COMPILED = (
    "corner bias + slopes", "corner key_mask ('bias'", "corner documents ('bias'", "corner dot_query + add_value",
    "corner states + scale", "corner 80 torch.float16", "corner 16 torch.float32", "corner tokens ('dot_query'", "rotation", "corner shifts",
)  # fmt: skip
"""Cases of tests.gpu.compiles that together have every kernel and every slot."""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("group", list_groups(CASES, QUICK))
def test_the_kernels_agree_with_the_reference(group):
    check_group(CASES, group, 1800)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_compile_for_a_gpu():
    root, source = CASES.parents[2], Path(engines.__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.gpu.compiles", "--only", ",".join(COMPILED)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=1800)
    assert done.returncode == 0 and done.stdout.endswith(" 0 failed\n"), (done.stdout + done.stderr)[-3000:]


def test_it_comes_first_and_refuses_a_cpu_at_once():
    assert next(iter(ENGINES)) == "triton"
    q, k, v = tensors(dtype=torch.float32)
    with pytest.raises(UnsupportedPlan, match="CUDA|not installed"):
        attend(q, k, v, plan_of(("bias",), q, k, v), engine="triton")


def test_an_old_triton_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(engines.triton, "INSTALLED", True)
    monkeypatch.setattr(engines.triton, "VERSION", (3, 2))
    q, k, v = tensors(dtype=torch.float32)
    with pytest.raises(UnsupportedPlan, match=r"3\.6 or newer, found 3\.2"):
        attend(q, k, v, engine="triton")


def test_refusing_does_not_load_triton():
    code = (
        "import sys, torch, posenc; q = torch.randn(1, 2, 3, 4); posenc.attend(q, q, q);"
        "loaded = 'triton' in sys.modules and 'posenc.engines.triton.ops' in sys.modules; sys.exit(int(loaded))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(engines.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def test_known_calls_name_every_table_of_a_lookup():
    """Slots of a plan that `describe` does not know have no key; tables of a lookup it names one by one."""
    known = {"index", "bias", "dot_query", "states", "dot_key", "add_value", "query_shift"}
    assert {slot.name for slot in dataclasses.fields(Lookup)} == known
