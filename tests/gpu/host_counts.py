"""What the host does for a repeated call on a GPU, counted without one: functions of this package, PyTorch's operations, allocations
outside of PyTorch's dispatcher, launches.

    python -m tests.gpu.host_counts

Tensors say that they are on a GPU, and compiled kernels do nothing. Run by tests/engines/test_host_counts.py in a fresh process, which
compares what is printed with pinned numbers.
"""

from __future__ import annotations

import json

import torch

import posenc
from posenc import Positions, attend
from posenc.bench import uses_layers
from posenc.bench.uses_calls import make_encoding
from posenc.core import launches, projection
from posenc.engines import gluon
from posenc.engines import triton as engine
from posenc.engines.triton import decode_step, launcher, replay
from tests.gpu.elsewhere import use_tiles_of
from tests.nn.test_work import count_calls

launched: list[str] = []
allocated: list[tuple] = []


class Kernel:
    """Compiled, as far as launches can tell."""

    function = packed_metadata = None

    def __init__(self, name: str):
        self.name = name

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid):
        return self.run

    def run(self, *args) -> None:
        launched.append(self.name)


def pretend() -> None:
    kernels: dict[str, Kernel] = {}

    def compile_kernel(kernel, *_):
        return kernels.setdefault(kernel.__name__, Kernel(kernel.__name__))

    use_tiles_of(90)
    engine.INTERPRETED = False
    engine.device_reason = lambda device: None
    gluon.refuse_device = lambda device: "short texts do not use it"
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.is_cpu = property(lambda self: False)
    torch.cuda.current_device = lambda: None  # the index of a CPU
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    launches.compile_kernel = launcher.compile_kernel = compile_kernel
    launcher.trailing_arguments = lambda *_: ()
    for module in (launches, replay, decode_step, projection):
        module.find_allocation = lambda device: allocate


def allocate(size, stride, dtype):
    allocated.append(size)
    return torch._C._dynamo.guards._empty_strided_cpu(size, stride, dtype)


def count(call, prepare=lambda: None) -> dict[str, int]:
    prepare()
    for _ in range(5):
        call()
    launched.clear()
    allocated.clear()
    call()
    found = {"calls": count_calls(call), "launches": len(launched) // 2, "allocations": len(allocated) // 2}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        call()
    found["operations"] = sum(event.name.startswith("aten::") and event.cpu_parent is None for event in record.events())
    return found


def one_call(name: str, training: bool, heads: int = 4, size: int = 32, length: int = 64):
    torch.manual_seed(0)
    encoding = make_encoding(name, heads, size, "cpu", torch.bfloat16)
    layer = posenc.Attention(heads * size, heads, encoding=encoding).to(torch.bfloat16)
    q, k, v = (torch.randn(1, heads, length, size, dtype=torch.bfloat16).requires_grad_(training) for _ in range(3))
    g, leaves = torch.randn_like(q), [q, k, v, *encoding.parameters()]

    def step():
        out = attend(q, k, v, encoding.plan(Positions(length), host=layer))
        return torch.autograd.grad(out, leaves, g)

    def forward():
        with torch.no_grad():
            return attend(q, k, v, encoding.plan(Positions(length), host=layer))

    return step if training else forward


def main() -> None:
    pretend()
    torch.autograd.set_multithreading_enabled(False)
    uses_layers.D_MODEL, uses_layers.HEADS = 64, 2
    found = {}
    for name in ("alibi", "t5", "clipped", "shaw", "deberta", "transformer_xl"):
        found[f"call/{name}/forward"] = count(one_call(name, False))
        found[f"call/{name}/step"] = count(one_call(name, True))
    for name in ("alibi", "t5", "clipped", "shaw", "transformer_xl", "relative_logits"):
        token = uses_layers.one_token(name, 64, "cpu", torch.bfloat16)
        found[f"layer/{name}/token"] = count(token.ours, token.prepare["posenc"])
        found[f"layer/{name}/forward"] = count(uses_layers.whole_text(name, 1, 16, False, "cpu", torch.bfloat16).ours)
    for name in ("none", "rope", "alibi", "t5"):
        for training in (False, True):
            layer = uses_layers.whole_text(name, 1, 16, training, "cpu", torch.bfloat16, "padded")
            found[f"padded/{name}/{'step' if training else 'forward'}"] = count(layer.ours)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
