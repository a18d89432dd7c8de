"""Records of launches without a kernel; triton_cases.group_replay runs recorded kernels."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import posenc

pytest.importorskip("triton")
from posenc.engines.triton import launcher, replay


def test_memory_of_records_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    replay._programs.clear()
    for number in range(10):
        replay.run_recorded((number,), [], lambda launch: None)
        assert len(replay._programs) <= 3


def test_a_record_must_not_read_values():
    x = torch.ones(3)
    for number in range(2):
        if number == 0:
            replay.run_recorded(("values",), [x], lambda launch, x: x * float(x.sum()))
        else:
            with pytest.raises(RuntimeError, match="must not depend"):
                replay.run_recorded(("values",), [x], lambda launch, x: x * float(x.sum()))
    replay._programs.clear()


class CopyKernel:
    """A kernel that copies two numbers from one address to another, compiled."""

    arg_names = ("to", "origin")
    function = packed_metadata = None

    def __getitem__(self, grid):
        return lambda *tensors: self.copy(*(x.data_ptr() for x in tensors))

    def run(self, x, y, z, stream, function, metadata, launch, enter, leave, *addresses):
        self.copy(*addresses)

    def copy(self, to, origin):
        ctypes.memmove(to, origin, 8)


def test_buffers_that_only_kernels_use_are_one_allocation(monkeypatch):
    for name, value in (
        ("INTERPRETED", False),
        ("current_stream", lambda device: 0),
        ("compile_kernel", lambda *_: copy),
    ):
        monkeypatch.setattr(launcher, name, value)
    copy, kept = CopyKernel(), []

    def run(launch, x):
        first, second = x.new_empty(3, 2), x.new_empty(40, 2)
        launch(copy, 1, first[1], x[2:3, 1:].expand(1, 2))  # a view of a view of an input
        launch(copy, 1, second.view(-1)[7:], first[1:].flatten())
        out = x.new_empty(2)
        launch(copy, 1, out.detach(), second.flatten()[7:9])
        return out, x.t()

    for number in range(4):
        x = torch.arange(12.0).view(4, 3) + number
        with CountAllocations() as count:
            out, turned = replay.run_recorded(("copy",), [x], run)
        kept.append(count.number)
        assert out.tolist() == [7.0 + number, 8.0 + number] and torch.equal(turned, x.t())
        assert turned.data_ptr() == x.data_ptr()
    replay._programs.clear()
    assert kept == [3, 3, 2, 2], "the output, and one for all others"


def test_memory_like_a_view_needs_no_view(monkeypatch):
    """A buffer in the place of `new_empty` of a view, and of empty_like one, is allocated by its size alone: without PyTorch's
    dispatcher where that is possible."""
    for name, value in (
        ("INTERPRETED", False),
        ("current_stream", lambda device: 0),
        ("compile_kernel", lambda *_: copy),
    ):
        monkeypatch.setattr(launcher, name, value)
    copy, kept = CopyKernel(), []
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(replay, "find_allocation", lambda device: allocate)

    def run(launch, packed):
        half = packed[8:16].view(torch.float32)
        out, turned = half.new_empty(2), torch.empty_strided((2, 3), (1, 2))
        launch(copy, 1, out, half.view(1, 2))
        launch(copy, 1, turned, torch.empty_like(half))
        return out, turned

    for number in range(4):
        packed = torch.arange(4.0 * number, 4.0 * number + 4).view(torch.uint8)
        with CountCalls() as count:
            out, turned = replay.run_recorded(("like",), [packed], run)
        kept.append(count.number)
        assert out.tolist() == [4.0 * number + 2, 4.0 * number + 3] and turned.stride() == (1, 2)
    replay._programs.clear()
    assert kept[2:] == [0, 0], f"operators in a record: {kept}"


class CountCalls(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


class CountAllocations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += "empty" in str(function)
        return function(*args, **(kwargs or {}))


class Recorded:
    """A compiled kernel that writes down its arguments, addresses for tensors."""

    function = packed_metadata = None

    def __init__(self, made):
        self.made = made

    def _init_handles(self):
        pass

    def run(self, *args):
        self.made.append([x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args])


@pytest.mark.parametrize("name", ["t5", "alibi", "clipped", "shaw"])
@pytest.mark.parametrize("keys", [16, 40])
def test_a_repeated_decoding_step_launches_what_the_first_one_did(monkeypatch, name, keys):
    from posenc.core import launches
    from posenc.core.mask import Mask
    from posenc.engines.lowering import lower_plan
    from posenc.engines.triton import decode_launch, decode_step

    made: list[list] = []
    monkeypatch.setattr(launches, "_variants", {})
    monkeypatch.setattr(launcher, "compile_kernel", lambda *_: Recorded(made))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(decode_step, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    q, k = torch.randn(1, 4, 1, 32, dtype=torch.bfloat16), torch.randn(1, 2, 64, 32, dtype=torch.bfloat16)
    k = k[:, :, :keys]
    encoding = posenc.create(name, heads=4, head_dim=32).to(torch.bfloat16)
    plan = encoding.plan(posenc.Positions((keys - 1, 1), keys))
    with torch.no_grad():
        lowered = lower_plan(q, k, k, plan, Mask(True))
        assert decode_launch.applies(lowered.facts) and decode_step.Step.supports(lowered)
        step = decode_step.Step(q, k, lowered)
        assert step.run(q, k, k, plan, 1 - keys) is None and not made, "nothing is compiled yet"
        decode_launch.run(q, k, k, lowered)
        first, made[:] = list(made), []
        assert step.run(q, k, k, plan, 1 - keys) is not None
        assert step.run(q[..., 1:17].expand(1, 4, 1, 16), k, k, plan, 1 - keys) is None, (
            "another alignment, another variant"
        )
    assert len(first) == len(made) == (1 if keys == 16 else 2)
    fresh = (
        {9 + 12, 9 + 17, 9 + 24},
        {9 + 0, 9 + 1},
    )  # out, shares and rows, after programs, stream and what Triton takes
    for before, now, own in zip(first, made, fresh, strict=False):
        assert len(before) == len(now)
        assert [x for n, x in enumerate(before) if n not in own] == [x for n, x in enumerate(now) if n not in own]


@pytest.mark.parametrize("keys", [12, 40, 300])
def test_steps_with_shifts_launch_what_the_first_one_did(monkeypatch, keys):
    """Transformer-XL: the table of each step has one row more, and the Step is the same."""
    from posenc.core import launches
    from posenc.engines import known_calls, triton
    from posenc.engines.lowering import lower_plan
    from posenc.engines.triton import decode_launch, decode_step

    made: list[list] = []
    monkeypatch.setattr(launches, "_variants", {})
    monkeypatch.setattr(known_calls, "_steps", {})
    monkeypatch.setattr(launcher, "compile_kernel", lambda *_: Recorded(made))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(decode_step, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    q, every = torch.randn(1, 4, 1, 32, dtype=torch.bfloat16), torch.randn(1, 2, 512, 32, dtype=torch.bfloat16)
    encoding = posenc.TransformerXL(d_model=128, heads=4, causal=True).to(torch.bfloat16)
    with torch.no_grad():
        for number, length in enumerate((keys, keys, keys + 1)):
            k = every[:, :, :length]
            plan = encoding.plan(posenc.Positions((length - 1, 1), length))
            lowered = lower_plan(q, k, k, plan, posenc.core.mask.Mask(True))
            out = known_calls.run_step(q, k, k, plan, True)
            assert (out is None) == (number == 0)
            repeated, made[:] = list(made), []
            out, _ = known_calls.run_with_shifts(triton, "auto", q, k, k, lowered)
            first, made[:] = list(made), []
            if number == 0:
                continue
            launched = 1 + (keys > 16) + (keys > decode_launch.MOST_OWN_ROWS)
            assert len(first) == len(repeated) == launched and len(known_calls._steps) == 1
            for before, now in zip(first, repeated, strict=True):
                assert len(before) == len(now)
                differ = [n for n, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
                assert all(max(before[n] or 0, now[n] or 0) > 1 << 20 for n in differ), "addresses of new memory alone"
                assert len(differ) <= 4


@pytest.mark.parametrize("farthest", [30, 400])
def test_steps_with_states_launch_what_the_first_one_did(monkeypatch, farthest):
    """relative_logits: a table that is multiplied with projections of the input."""
    from posenc.core import launches
    from posenc.engines import known_calls
    from posenc.engines.lowering import lower_plan
    from posenc.engines.triton import decode_launch, decode_step

    made: list[list] = []
    monkeypatch.setattr(launches, "_variants", {})
    monkeypatch.setattr(launcher, "compile_kernel", lambda *_: Recorded(made))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(decode_step, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    q, every = torch.randn(1, 4, 1, 32, dtype=torch.bfloat16), torch.randn(1, 2, 64, 32, dtype=torch.bfloat16)
    encoding = posenc.create("relative_logits", d_model=64, heads=4, head_dim=32, max_distance=farthest).bfloat16()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))  # a GPU's table has all rows
    for module in (decode_step, decode_launch):
        monkeypatch.setattr(module, "launch_on", nullcontext)
    with torch.no_grad():
        x = torch.randn(1, 1, 64, dtype=torch.bfloat16)
        for length in (40, 41):
            k = every[:, :, :length]
            plan = encoding.plan(posenc.Positions((length - 1, 1), length), x=x)
            lowered = lower_plan(q, k, k, plan, posenc.core.mask.Mask(True))
            if length == 40:
                assert decode_step.Step.supports(lowered)
                step, key = decode_step.Step(q, k, lowered), known_calls.describe_step(q, k, k, plan, True)
            assert known_calls.describe_step(q, k, k, plan, True) == key
            decode_launch.run(q, k, k, lowered)
            first, made[:] = list(made), []
            assert step.run(q, k, k, plan, 1 - length) is not None
            repeated, made[:] = list(made), []
            assert len(first) == len(repeated) == 2 + (farthest + 2 > decode_launch.MOST_OWN_ROWS)
            for before, now in zip(first, repeated, strict=True):
                assert len(before) == len(now)
                differ = [n for n, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
                assert all(max(before[n] or 0, now[n] or 0) > 1 << 20 for n in differ), "addresses of new memory alone"


def test_the_key_of_a_step_has_every_slot():
    """known_calls.describe_step names the slots one by one: a new one must be in its key, or refused there."""
    from dataclasses import fields

    slots = "positions shift rotate cosine append lookups scale slopes decay pair pair_axes sinks"
    assert [x.name for x in fields(posenc.Plan)] == slots.split()
    assert [x.name for x in fields(posenc.Lookup)] == [
        "index",
        "bias",
        "dot_query",
        "states",
        "dot_key",
        "add_value",
        "query_shift",
    ]


def test_launches_of_triton_3_6_leave_its_python_code_out():
    from posenc.core import launches

    class Launcher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True

        def __call__(self, gridX, gridY, gridZ, stream, function, *args):
            return self.launch(
                gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, None, None, *args
            )

        def launch(self, *args):
            return args

    compiled = SimpleNamespace(run=Launcher(), function=5, packed_metadata=(4, 1, 0))
    run, between = launches.find_launch(compiled)
    assert run == compiled.run.launch
    assert run(2, 1, 1, 7, *between, "x") == compiled.run(2, 1, 1, 7, 5, (4, 1, 0), None, None, None, "x")
    compiled.run.global_scratch_size = 16
    assert launches.find_launch(compiled)[0] is compiled.run


def test_lengths_do_not_multiply_variants():
    from posenc.engines.triton.band_layout import Band

    def band(lo, hi, origin, pitch):
        return Band(None, 64, 32, pitch, 16, 0, origin, lo, hi, None, 64, None, None)

    def typical(x):
        return launcher.typical_argument(SimpleNamespace(is_constexpr=False, do_not_specialize=False), x)

    first, second = typical(band(-128, 128, 1, 272)), typical(band(-3, 16, 0, 48))
    assert first == second
    assert typical(band(-3, 16, 0, 50)) != second, "divisibility of a stride is needed for wide loads"
    assert typical(2**40 + 1) > 2**31, "the type is kept"


def test_warm_up_changes_nothing_on_a_cpu():
    layer = posenc.Attention(16, 2, encoding="t5", dropout=0.5)
    x = torch.randn(1, 5, 16)
    state = torch.random.get_rng_state()
    assert posenc.warm_up(layer, x) == []
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in layer.parameters())
