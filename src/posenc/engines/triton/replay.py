"""Do again what an equal call did, without the Python code in between.

Which buffers a call allocates, which operations and kernels it runs and with which numbers depends on the shapes, strides and
dtypes of its tensors and on a few numbers alone: its key. The first call with a key runs as it is written; the second is
recorded; from the third on, only the record runs:

    launch.py, second call                                     record: a function made of the lines
    out = q.new_empty(2, 8, 512, 64)                           t3 = empty([2, 8, 512, 64], dtype=.., device=..)
    tile = schedule.choose_tile(...)
    launch(forward, 64, View(q, *q.stride()[:3]), ...)         c1(64, 1, 1, stream, .., View(t0, 262144, 32768, 64), ...)
    return out                                                 return t3

Calls whose shapes never come twice, as while a text is generated, are not recorded. A tensor that is neither an input nor made
by the call itself must be a constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import launcher

ALLOCATIONS = {
    torch.ops.aten.new_empty.default: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty,
    torch.ops.aten.new_zeros.default: torch.zeros,
}
MOST = 1024  # keys that are remembered
_programs: dict[tuple, Callable | None] = {}


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
            return self.names.get(id(x)) or self.constant(x)
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            self.space[type(x).__name__] = type(x)
            return f"{type(x).__name__}({', '.join(map(self.write, x))})"
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self.write(element)}, " for element in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        if x is None or isinstance(x, (bool, int, str)) or (isinstance(x, float) and math.isfinite(x)):
            return repr(x)
        return self.constant(x)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = [*map(self.write, args), *(f"{name}={self.write(x)}" for name, x in kwargs.items())]
        call = f"{self.constant(function)}({', '.join(arguments)})"
        result = function(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            call = f"{', '.join(self.name(x, 't') for x in result)}, = {call}"
        elif not isinstance(result, Tensor):
            raise RuntimeError(f"{function} reads a tensor's values; a launch must not depend on them")
        elif id(result) not in self.names:  # operations in place return what they were given
            if function in ALLOCATIONS and result.is_contiguous():  # half the price of a call of an operator
                options = f"dtype={self.write(result.dtype)}, device={self.write(result.device)}"
                call = f"{self.constant(ALLOCATIONS[function])}({self.write(list(result.shape))}, {options})"
            call = f"{self.name(result, 't')} = {call}"
        self.lines.append(call)
        return result

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
        first = (write(compiled.function), write(compiled.packed_metadata), "None, None, None")
        arguments = [f"{programs}, 1, 1, stream", *first, *map(write, args)]
        self.lines.append(f"{self.constant(compiled.run)}({', '.join(arguments)})")

    def finish(self, results) -> Callable:
        lines = [*self.lines, f"return {self.write(results)}"]
        last_use = {name: number for number, line in enumerate(lines) for name in re.findall(r"\bt\d+\b", line)}
        ends: dict[int, list[str]] = {}
        for name, number in last_use.items():
            if number < len(lines) - 1:
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
