"""The CUDA kernel against the formula: by Triton's interpreter where there is no device, and on the device."""

import os
import subprocess
import sys

import pytest
import torch

import posenc
from posenc.core.rotation import apply_rotary, rotate_both, rotate_by_formula
from tests import budget
from tests.core.interpreted import run_interpreted

CASES = [
    (2, 3, 13, 8, 8), (1, 9, 7, 16, 8), (2, 2, 5, 24, 12), (1, 1, 1, 6, 4), (1, 2, 3, 8, 0),
    (1, 2, 70, 24, 16), (1, 1, 100, 22, 12), (1, 2, 70, 16, 16),
]  # fmt: skip
"""(batch, heads, length, size, width); the last need several tiles, one of which has no whole positions."""


def check(rotate_tensors, device, dtypes=(torch.float32, torch.bfloat16, torch.float64), cases=CASES):
    for batch, heads, length, size, width in cases:
        for layout in ("half", "interleaved"):
            for dtype in dtypes:
                for rows in {1, batch} if dtype == dtypes[0] else {batch}:
                    x = torch.randn(batch, length, heads, size, device=device).to(dtype).transpose(1, 2)
                    angle = torch.rand(rows, length, width // 2, device=device) * 6
                    wide = torch.promote_types(dtype, torch.float32)
                    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
                    k = torch.randn(batch, 2, length, size, device=device).to(dtype)
                    for given in ((x,), (k, x)) if dtype == dtypes[0] else ((x, k),):
                        for ours, one in zip(rotate_tensors(given, cos, sin, layout), given, strict=True):
                            exact = rotate_by_formula(one.double(), cos.double(), sin.double(), layout)
                            # two products and their sum in float32 or better, the result rounded once
                            sums = 3 * budget.unit(wide) * 2 * one.abs().max().item() + 2.0**-25 * (
                                dtype == torch.float16
                            )
                            torch.testing.assert_close(ours.double(), exact, atol=sums, rtol=1.01 * budget.unit(dtype))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested on the device")
@pytest.mark.parametrize("some", ["CASES[::5]", pytest.param("CASES", marks=pytest.mark.slow)])
def test_the_kernel_by_the_interpreter(some):
    pytest.importorskip("triton")
    # the interpreter truncates bfloat16 where a device rounds it: bfloat16 is tested on the device
    code = (
        "import torch; from tests.core.test_rotary_kernel import CASES, check; from posenc.core.rotary_kernel import rotate_tensors; "
        f"check(rotate_tensors, 'cpu', (torch.float32, torch.float16, torch.float64), {some})"
    )
    run_interpreted(code)


def test_a_launch_that_is_ready_differs_in_addresses_alone(monkeypatch):
    pytest.importorskip("triton")
    from posenc.core import launches, rotary_kernel

    class Compiled:
        function = packed_metadata = None

        def _init_handles(self):
            pass

        def run(self, *args):
            taken.append(args[9:])

    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(rotary_kernel, "_compile", lambda *_: Compiled())
    monkeypatch.setattr(rotary_kernel, "_ready", {})
    monkeypatch.setattr(rotary_kernel, "current_device", lambda: 0)  # as where there is a device
    monkeypatch.setattr(launches, "_variants", {})
    taken, given = [], []
    for _ in range(2):
        q, k = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 2, 5, 8)
        given.append((q, k, torch.randn(1, 5, 4), torch.randn(1, 5, 4)))
        outs = rotary_kernel.rotate_tensors((q, k), *given[-1][2:], "half")
        assert [x.stride() for x in outs] == [q.stride(), k.stride()]
        given[-1] += outs
    first, second = taken
    for number, (before, after) in enumerate(zip(first, second, strict=True)):
        if isinstance(before, torch.Tensor):
            place = next(at for at, x in enumerate(given[0]) if x is before)
            assert after == given[1][place].data_ptr(), number
        else:
            assert after == before, number
    rotary_kernel.rotate_tensors((given[0][0], given[0][1]), *given[0][2:4], "interleaved")
    rotary_kernel.rotate_tensors((given[0][0],), *given[0][2:4], "half")
    assert len(rotary_kernel._ready) == 3
    ready = rotary_kernel.find_ready(given[0][:2], *given[0][2:4], "half")
    taken.clear()
    for _ in range(3):  # compiled, kept, found by strides
        ready.rotate_back(given[0][4:], *given[0][2:4])
    assert len(ready.gradients) == 1 and [x[-4:] for x in taken[1:]] == [taken[0][-4:]] * 2
    assert taken[0][-3] is True, "INVERSE"


@pytest.mark.parametrize("wanted", ["q", "k", "qk"])
def test_gradients_of_a_launch_that_is_ready(wanted):
    from posenc.core import rotation

    class Ready:
        layout, inverse = "half", False

        def run(self, tensors, cos, sin):
            return tuple(rotation.rotate_by_formula(x, cos, sin, "half") for x in tensors)

        def rotate_back(self, grads, cos, sin):
            return self.run(grads, cos, -sin)

    given = [torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2)]
    cos, sin = torch.randn(2, 1, 5, 4, dtype=torch.float64).unbind()
    weights = [torch.randn_like(x) for x in given]

    def grads(outs, **options):
        loss = sum((x.square() * w).sum() for name, x, w in zip("qk", outs, weights) if name in wanted)
        used = [x for name, x in zip("qk", given) if name in wanted]
        return torch.autograd.grad(loss, used, **options)

    ours = rotation._apply_ready(Ready(), cos, sin, *given)
    formula = [rotation.rotate_by_formula(x, cos, sin, "half") for x in given]
    for one, other in zip(grads(ours, retain_graph=True), grads(formula), strict=True):
        torch.testing.assert_close(one, other)
    first = grads(ours, create_graph=True)
    torch.autograd.grad(sum(x.square().sum() for x in first), [x for name, x in zip("qk", given) if name in wanted])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_the_device():
    def one_or_both(tensors, cos, sin, layout):
        return (
            (apply_rotary(*tensors, cos, sin, layout),)
            if len(tensors) == 1
            else rotate_both(*tensors, cos, sin, layout)
        )

    check(one_or_both, "cuda", (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    rope = posenc.RoPE(head_dim=64).cuda()
    x = torch.randn(2, 4, 33, 64, device="cuda", requires_grad=True)
    grad = torch.randn_like(x)
    (ours,) = torch.autograd.grad(rope.rotate(x, 33), x, grad)
    cos, sin = rope.rotation(posenc.Positions(33)).q
    (theirs,) = torch.autograd.grad(rotate_by_formula(x, cos, sin, "half"), x, grad)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device():
    """Positions that are on the device, checked there, with frequencies that follow the length."""
    line = torch.stack((torch.arange(40), torch.arange(40) + 2**30)).cuda()
    mixed = posenc.rope.mixed_positions([10, (5, 6)]).expand(2, -1, -1).cuda()
    q, k = torch.randn(2, 4, 40, 64, device="cuda"), torch.randn(2, 2, 40, 64, device="cuda")
    dynamic = posenc.scaling.DynamicNTK(factor=2.0, original=16)
    for encoding, at in (
        (posenc.RoPE(head_dim=64), line), (posenc.RoPE(head_dim=64, scaling=dynamic), line),
        (posenc.RoPE(head_dim=64, scaling=posenc.scaling.DynamicYaRN(original=16)), line),
        (posenc.MRoPE(head_dim=64), mixed), (posenc.MRoPE(head_dim=64, scaling=dynamic), mixed),
        (posenc.AxialRoPE(head_dim=64, columns=8), line),
    ):  # fmt: skip
        encoding.cuda().rotation(posenc.Positions(at)).rotate_qk(q, k)  # constants are made and kernels compiled
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = encoding.rotation(posenc.Positions(at)).rotate_qk(q, k)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        theirs = encoding.cpu().rotation(posenc.Positions(at.cpu())).rotate_qk(q.cpu(), k.cpu())
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.cpu(), b, atol=2e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_positions_out_of_range_raise_on_the_device():
    """In a process of its own: a device-side assertion ends the use of the device."""
    code = (
        "import torch, posenc\nrope = posenc.RoPE(head_dim=8).cuda()\n"
        "rope.rotation(posenc.Positions(torch.tensor([5, 2**31], device='cuda')))\ntorch.cuda.synchronize()"
    )
    path = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode != 0
    assert "positions leave the range of rotary phases" in done.stderr or "device-side assert" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_phases_are_the_same_on_the_device():
    for extension in (None, posenc.scaling.DynamicNTK(factor=2.0, original=64)):
        rope = posenc.RoPE(head_dim=64, scaling=extension)
        positions = posenc.Positions((2**20, 100))
        here = rope.rotation(positions).q
        there = rope.cuda().rotation(positions).q
        for a, b in zip(here, there, strict=True):
            torch.testing.assert_close(b.cpu(), a, atol=1.2e-7, rtol=0.0)


def test_only_what_was_rotated_before_is_rotated_again(monkeypatch):
    """`Rotation.rotate_again` finds a launch by everything that the checks would look at, and none where there is more to do."""
    from dataclasses import replace

    from posenc.core import rotary_kernel
    from posenc.core.rotation import Rotation

    made = []

    class Ready:
        def run(self, tensors, cos, sin):
            made.append(tensors)
            return tensors

    def find_ready(tensors, cos, sin, layout):
        return Ready() if layout == "half" else None

    monkeypatch.setattr(rotary_kernel, "find_ready", find_ready)
    cos, sin = torch.ones(2, 1, 5, 4).unbind()
    q, k = torch.randn(2, 1, 2, 5, 8).unbind()
    rotation = Rotation((cos, sin), (cos, sin), "half")
    assert rotation.rotate_again(q, k) == (q, k) and len(made) == 1
    others = (
        replace(rotation, layout="interleaved"), replace(rotation, values=True), replace(rotation, polar=True),
        replace(rotation, k=None), replace(rotation, k=(cos.clone(), sin)),
        replace(rotation, q=(cos.clone().requires_grad_(), sin)),
    )  # fmt: skip
    for other in others:
        assert other.rotate_again(q, k) is None
