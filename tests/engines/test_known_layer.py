"""A layer's calls on a GPU that are like the one before (engines/known_layer.py), with Triton's interpreter in its place."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
from types import SimpleNamespace
import torch
import posenc
from posenc import Lookup, Plan, Positions, attend, index
from posenc.engines.known_layer import KnownText, KnownToken, Refused
from tests.engines.interpreter import mend

mend()
torch.manual_seed(0)


def plans(length):
    positions = Positions(length)
    return {
        "slopes": Plan(positions, slopes=torch.rand(2)),
        "bias": Plan(positions, lookups=(Lookup(index.clip(3, 3), bias=torch.randn(2, 7)),), scale=0.5),
        "products": Plan(positions, lookups=(Lookup(index.clip(3, 3), dot_query=torch.randn(1, 7, 16)),)),
    }


def heads(length):
    return [torch.randn(1, length, 2, 16).transpose(1, 2) for _ in range(3)]


found = 0
with torch.no_grad():
    for length in (17,):
        for name, plan in plans(length).items():
            known = None
            for _ in range(4):
                q, k, v = heads(length)
                out = attend(q, k, v, plan, causal=True)
                known = KnownText.find(q, k, v, plan, {"causal": True})
            if not isinstance(known, KnownText):
                print("not kept:", length, name)
                continue
            found += 1
            q, k, v = heads(length)
            torch.testing.assert_close(known.run(q, k, v), attend(q, k, v, plan, causal=True))
            truth = attend(q, k, v, plan, causal=True, engine="reference")
            torch.testing.assert_close(known.run(q, k, v), truth, atol=2e-2, rtol=2e-2)
            # whatever differs is refused
            longer = heads(length + 1)
            assert known.run(*longer) is None
            assert known.run(q.contiguous(), k, v) is None
            assert known.run(q.double(), k.double(), v.double()) is None
            torch.use_deterministic_algorithms(True)
            assert known.run(q, k, v) is None
            torch.use_deterministic_algorithms(False)
            with torch.enable_grad():
                assert known.run(q, k, v) is None
    # a text so short that it runs as a decoding step
    class Step:
        def run(self, *given):
            return given

    plan, tensors = plans(12)["slopes"], heads(12)
    known = KnownText(SimpleNamespace(call=None, step=Step()), plan, [*tensors, None])
    assert known.run(*tensors) == (*tensors, plan, 0)
    # one token after others: for any number of keys, and nothing else
    q, every = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 40, 16)
    token = KnownToken(Step(), q, every[:, :, :7], every[:, :, :7], plan)
    for keys in (7, 8, 40):
        k = every[:, :, :keys]
        assert token.run(q, k, k)[3:] == (plan, 1 - keys)
        assert token.run(q, k, every[:, :, : keys - 1]) is None
        assert token.run(q, k[:, :1], k[:, :1]) is None and token.run(q, k.double(), k) is None
        assert token.run(torch.nn.Parameter(q, False), k, k) is None and token.run(every[:, :, :2], k, k) is None
        with torch.enable_grad():
            assert token.run(q, k, k) is None
        with torch.utils._python_dispatch.TorchDispatchMode():
            assert token.run(q, k, k) is None
    assert token.run(q, every[:, :, :1], every[:, :, :1]) is None, "the first token is a text"
    # what is not replayed is refused for good
    far = Plan(Positions(20), slopes=torch.rand(2), sinks=torch.rand(2))
    assert isinstance(KnownText.find(*heads(20), far, {"causal": True}), Refused)
print("found", found)
"""


def test_calls_like_the_one_before_give_its_result():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "found 3" in done.stdout, done.stdout
