"""Do again what an equal call did, without the Python code in between.

Which buffers a call allocates, which operations and kernels it runs and with which numbers depends on the shapes, strides and
dtypes of its tensors and on a few numbers alone: its key. The first call with a key runs as it is written; the second is
recorded; from the third on, only the record runs:

    launch.py, second call                                     record: a function made of the lines
    out = q.new_empty(2, 8, 512, 64)                           t3 = empty([2, 8, 512, 64], dtype=.., device=..)
    tile = schedule.choose_tile(...)
    launch(forward, 64, View(q, *q.stride()[:3]), ...)         c1(64, 1, 1, stream, .., (t0.data_ptr(), 262144, 32768, 64), ...)
    return out                                                 return t3

Calls whose shapes never come twice, as while a text is generated, are not recorded. A tensor that is neither an input nor made
by the call itself must be a constant. Kernels take addresses: in the record, a view that only kernels read is an address plus an
offset, and small buffers that only kernels use share one allocation. So do results that only the backward pass reads (`packable`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...core.launches import find_allocation
from . import launcher

ALLOCATIONS = {
    torch.ops.aten.new_empty.default: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty,
    torch.ops.aten.empty_strided.default: torch.empty,
    torch.ops.aten.new_zeros.default: torch.zeros,
    torch.ops.aten.zeros_like.default: torch.zeros,
}
SHARED = 1 << 24  # bytes: larger buffers are freed as soon as they are used
ALIGNED = 512  # bytes, as PyTorch's own allocations
MOST = 1024  # keys that are remembered
_programs: dict[tuple, Callable | None] = {}


class DescriptorArguments(NamedTuple):
    """What the launcher reads of a TensorDescriptor of the Gluon kernels, without its checks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    padding: str


def describe(tensors: Sequence[Tensor | None]) -> tuple:
    """What a call's buffers and launches depend on of these tensors."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15) for x in tensors])


def run_recorded(key: tuple, tensors: Sequence[Tensor | None], function: Callable):
    """function(launch, *tensors): tensors, None, or a tuple or list of both. key: everything else that it depends on, besides
    the tensors' values; `describe(tensors)` is part of it."""
    program = _programs.get(key)
    if program is not None:
        return program(*tensors)
    if key not in _programs:
        if len(_programs) >= MOST:
            _programs.clear()
        _programs[key] = None
        return function(launcher.launch, *tensors)
    recorder = Recorder(tensors)
    with recorder:
        results = function(recorder.launch, *recorder.inputs)
    _programs[key] = recorder.finish(results)
    return results


class Recorder(TorchDispatchMode):
    """Writes down every operation and launch while it runs."""

    def __init__(self, tensors: Sequence[Tensor | None]):
        super().__init__()
        # A tensor that is given twice must get two names: the next call may give two tensors.
        self.inputs = [None if x is None else x.detach() for x in tensors]
        self.names: dict[int, str] = {}
        self.alive: list = [self.inputs]  # a name is that of an object, whose id must not be given to another one
        self.space: dict[str, object] = {}
        self.lines: list[str] = []
        self.pointers: set[str] = set()
        self.views: dict[int, tuple] = {}
        """By the id of what a view's operator returned: the operator and its arguments."""
        self.buffers: dict[str, int] = {}  # names of empty ones: bytes
        self.shared: set[str] = set()  # those in one allocation
        self.packed: dict[int, tuple[int, torch.Size, torch.dtype]] = {}
        """By the result's number: first byte, shape, dtype."""
        self.parameters = [self.name(x, "t") for x in self.inputs]

    def name(self, x, letter: str) -> str:
        name = f"{letter}{len(self.names)}"
        self.names[id(x) if x is not None else id(name)] = name
        self.alive.append((x, name))
        return name

    def constant(self, x) -> str:
        """The name of an object that stays the same from call to call."""
        if id(x) not in self.names:
            self.space[self.name(x, "c")] = x
        return self.names[id(x)]

    def write(self, x) -> str:
        """x as an expression."""
        if isinstance(x, Tensor):
            if id(x) in self.views and id(x) not in self.names:
                self._write_view(x)
            return self.names.get(id(x)) or self.constant(x)
        if type(x).__name__ == "TensorDescriptor":
            return self.write(DescriptorArguments(x.base, list(x.shape), list(x.strides), x.padding))
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            self.space[type(x).__name__] = type(x)
            return f"{type(x).__name__}({', '.join(map(self.write, x))})"
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self.write(element)}, " for element in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        if x is None or isinstance(x, (bool, int, str)) or (isinstance(x, float) and math.isfinite(x)):
            return repr(x)
        return self.constant(x)

    def _write_view(self, x: Tensor) -> None:
        """A view that is needed as a tensor."""
        function, args, kwargs = self.views[id(x)]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            self.names[id(x)] = self.write(args[0])
        else:
            call = self._write_call(function, args, kwargs)
            self.lines.append(f"{self.name(x, 't')} = {call}")

    def _write_call(self, function, args, kwargs) -> str:
        arguments = [*map(self.write, args), *(f"{name}={self.write(x)}" for name, x in kwargs.items())]
        direct = getattr(function, "_op", function)  # what an OpOverload calls
        return f"{self.constant(direct)}({', '.join(arguments)})"

    def write_argument(self, x) -> str:
        """x as an argument of a compiled kernel, which takes tuples of any type, and addresses sooner than tensors."""
        if isinstance(x, tuple):
            return f"({''.join(f'{self.write_argument(element)}, ' for element in x)})"
        if not isinstance(x, Tensor):
            return self.write(x)
        base = x
        while id(base) in self.views and id(base) not in self.names:
            base = self.views[id(base)][1][0]
        name = self.write(base)
        if name in self.space:
            return repr(x.data_ptr())
        if name not in self.pointers:
            self.pointers.add(name)
            self.lines.append(f"p{name} = {name}.data_ptr()")
        offset = x.data_ptr() - base.data_ptr() if x.numel() else 0
        return f"p{name} + {offset}" if offset else f"p{name}"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is torch.ops.aten.promote_types.default:  # of dtypes, not of tensors
            return result
        if _may_be_view(function) and isinstance(args[0], Tensor):
            if result is args[0]:
                return result
            if result.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                self.views[id(result)] = function, args, kwargs
                self.alive.append(result)
                return result
        if function in ALLOCATIONS and isinstance(result, Tensor):  # its arguments need not be tensors in the record
            name = self.name(result, "t")
            self.lines.append(f"{name} = {self._write_allocation(name, function, args, kwargs, result)}")
            return result
        call = self._write_call(function, args, kwargs)
        if isinstance(result, (tuple, list)):
            call = f"{', '.join(self.name(x, 't') for x in result)}, = {call}"
        elif not isinstance(result, Tensor):
            raise RuntimeError(f"{function} reads a tensor's values; a launch must not depend on them")
        elif id(result) not in self.names and id(result) not in self.views:  # in place they return what they were given
            call = f"{self.name(result, 't')} = {call}"
        self.lines.append(call)
        return result

    def _write_allocation(self, name: str, function, args, kwargs, result: Tensor) -> str:
        """By what takes the host least time (`allocate`, else torch.empty, or empty_like an input)."""
        size, stride, dtype, device = tuple(result.shape), result.stride(), result.dtype, result.device
        options = f"dtype={self.write(dtype)}, device={self.write(device)}"
        if ALLOCATIONS[function] is torch.zeros:
            if not result.is_contiguous():
                return self._write_call(function, args, kwargs)
            return f"{self.constant(torch.zeros)}({size}, {options})"
        if result.is_contiguous():
            self.buffers[name] = result.nbytes
        allocate = find_allocation(device)
        if allocate is not None:
            return f"{self.constant(allocate)}({size}, {stride}, {self.write(dtype)})"
        like = next((x for x in self.inputs if x is not None and _is_like(x, result)), None)
        if like is not None:
            return f"{self.constant(torch.empty_like)}({self.write(like)})"
        if result.is_contiguous():
            return f"{self.constant(torch.empty)}({size}, {options})"
        return f"{self.constant(torch.empty_strided)}({size}, {stride}, {options})"

    def launch(self, kernel, programs: int, *args, **constants) -> None:
        write = self.write
        if launcher.INTERPRETED:
            arguments = [*map(write, args), *(f"{name}={write(x)}" for name, x in constants.items())]
            self.lines.append(f"{self.constant(kernel)}[({programs},)]({', '.join(arguments)})")
            with _disable_current_modes():
                kernel[(programs,)](*args, **constants)
            return
        compiled = launcher.compile_kernel(kernel, args, constants)
        if compiled is None:
            return
        args = (*args, *launcher.trailing_arguments(kernel, args, constants))
        with _disable_current_modes():
            compiled[(programs, 1, 1)](*args)
        # what compiled[grid] calls, without looking up the stream and hooks for each launch
        run, between = launcher.find_launch(compiled)
        arguments = [f"{programs}, 1, 1, stream", *map(write, between), *map(self.write_argument, args)]
        self.lines.append(f"{self.constant(run)}({', '.join(arguments)})")

    def finish(self, results, packable: Sequence[int] = ()) -> Callable:
        """The record as a function. packable: numbers of results that may be one allocation, which is returned behind them: they
        are None, and `packed` has their offsets in it."""
        packing = self._pack(results, packable)
        if packing:
            results = tuple([None if number in self.packed else x for number, x in enumerate(results)])
        returned = f"return {self.write(results)}"
        lines = self._share_buffers([*packing, *self.lines, f"{returned} + (kept,)" if packing else returned])
        last_use = {name: number for number, line in enumerate(lines) for name in re.findall(r"\bp?(t\d+)\b", line)}
        ends: dict[int, list[str]] = {}
        for name, number in last_use.items():
            if number < len(lines) - 1 and name not in self.shared:
                ends.setdefault(number, []).append(name)
        source = [f"def replay({', '.join(self.parameters)}):"]
        if not launcher.INTERPRETED:
            device = self.inputs[0].device if self.inputs else None
            self.space["current_stream"] = launcher.current_stream
            source.append(f"    stream = current_stream({None if device is None else device.index})")
        for number, line in enumerate(lines):
            source.append(f"    {line}")
            if number in ends:
                source.append(f"    del {', '.join(ends[number])}")  # memory is free for what follows
        exec("\n".join(source), self.space)
        return self.space["replay"]  # type: ignore[return-value]

    def _pack(self, results, packable: Sequence[int]) -> list[str]:
        """Lines that allocate all results that can be packed; their own allocations are taken out of the record."""
        uses = re.findall(r"\bt\d+\b", "\n".join(self.lines))
        found: dict[str, int] = {}
        for number in packable:
            name = self.names.get(id(results[number]), "")
            is_small = self.buffers.get(name, SHARED + 1) <= SHARED
            if is_small and name in self.pointers and uses.count(name) == 2:
                found[name] = number
        if len(found) < 2:
            return []
        total = 0
        self.shared.update(found)
        for name, number in found.items():
            self.packed[number] = total, results[number].shape, results[number].dtype
            address = f"p{name} = {name}.data_ptr()"
            kept = (f"p{name} = pk + {total}" if line == address else line for line in self.lines)
            self.lines = [line for line in kept if not line.startswith(f"{name} = ")]
            total += -(-self.buffers.pop(name) // ALIGNED) * ALIGNED
        return self._write_bytes("kept", "pk", total)

    def _write_bytes(self, name: str, address: str, count: int) -> list[str]:
        assert self.inputs[0] is not None
        device, dtype = self.inputs[0].device, self.write(torch.uint8)
        allocate = find_allocation(device)
        if allocate is not None:
            made = f"{self.constant(allocate)}(({count},), (1,), {dtype})"
        else:
            made = f"{self.constant(torch.empty)}([{count}], dtype={dtype}, device={self.write(device)})"
        return [f"{name} = {made}", f"{address} = {name}.data_ptr()"]

    def _share_buffers(self, lines: list[str]) -> list[str]:
        """One allocation for all small buffers of which addresses alone are used."""
        uses: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            for name in re.findall(r"\bt\d+\b", line):
                uses.setdefault(name, []).append(number)
        replaced: dict[int, str | None] = {}
        total = 0
        small = [name for name, size in self.buffers.items() if name in self.pointers and size <= SHARED]
        small = [name for name in small if len(uses[name]) == 2]
        if len(small) < 2:
            return lines
        for name in small:
            allocated, addressed = uses[name]
            replaced |= {allocated: None, addressed: f"p{name} = pt + {total}"}
            total += -(-self.buffers[name] // ALIGNED) * ALIGNED
        self.shared.update(small)
        first = self._write_bytes("shared", "pt", total)
        kept = (replaced.get(number, line) for number, line in enumerate(lines))
        return [*first, *(line for line in kept if line is not None)]


def _is_like(x: Tensor, result: Tensor) -> bool:
    """Whether empty_like(x) is such a tensor."""
    if (x.shape, x.stride(), x.dtype, x.device) != (result.shape, result.stride(), result.dtype, result.device):
        return False
    return torch.empty_like(x, device="meta").stride() == x.stride()  # not so where x is expanded


def _may_be_view(function) -> bool:
    """Whether an operator returns one tensor that is, or may be (reshape, to), a view of its first argument."""
    returns = function._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return alias is not None and not alias.is_write and isinstance(returns[0].type, torch.TensorType)
