"""Checks the memory accesses of interpreted kernels: programs run one after another there, which would hide races.

    outside          a load or store outside the kernel's tensors
    two programs     a number that one program writes and another writes or reads, in one launch
    twice            a number that one program writes twice, or reads after it wrote it, without a barrier in between: on a GPU
                     other threads may do so
    one store        one store with two numbers for one address
    sums             floating-point numbers added atomically: their sum depends on the order

Every launch `with triton_memory.watched()` is checked for these.
"""

from contextlib import contextmanager

import numpy as np
from triton.runtime import interpreter

NOBODY = -1


class Watch:
    """One launch: the storages of its tensors, and for each byte the program that wrote it and the last that read it."""

    def __init__(self, name, storages):
        self.name, self.program, self.barriers = name, 0, 0
        order = sorted(storages.items())
        self.starts = np.array([start for start, _ in order], dtype=np.int64)
        sizes = np.array([size for _, size in order], dtype=np.int64)
        self.ends = self.starts + sizes
        self.shift = np.concatenate(([0], np.cumsum(sizes)[:-1])) - self.starts  # address -> index in the arrays below
        self.writer = np.full(int(sizes.sum()), NOBODY, np.int32)
        self.reader = np.full(int(sizes.sum()), NOBODY, np.int32)
        self.when = np.zeros(int(sizes.sum()), np.int32)  # it wrote: how many barriers there were before

    def unsafe(self, at):
        """What another program has written, or this one since the last barrier."""
        who = self.writer[at]
        return (who != NOBODY) & ((who != self.program) | (self.when[at] == self.barriers))

    def indices(self, pointers, mask, width, what):
        """Indices of the accessed numbers in `writer` and `reader`."""
        at = pointers.data[mask.data.astype(bool)].astype(np.int64)
        which = np.searchsorted(self.starts, at, side="right") - 1
        wrong = (which < 0) | (at + width > self.ends[which])
        assert not wrong.any(), f"{self.name}, program {self.program}: {what} outside, {wrong.sum()} of {at.size}"
        return at + self.shift[which]

    def load(self, pointers, mask, width):
        at = self.indices(pointers, mask, width, "load")
        self.never(self.unsafe(at), "loads what was stored in this launch")
        self.reader[at] = self.program

    def store(self, pointers, mask, width, shared=False):
        at = self.indices(pointers, mask, width, "store")
        others = self.reader[at]
        self.never((others != NOBODY) & (others != self.program), "stores what another program has loaded")
        who = self.writer[at]
        if shared:
            self.never((who != NOBODY) & (who != self.program), "adds to what another program has stored")
        else:
            self.never(self.unsafe(at), "stores twice")
            self.never(np.array(np.unique(at).size != at.size), "stores two numbers at one address")
        self.writer[at], self.when[at] = self.program, self.barriers

    def never(self, wrong, what):
        assert not wrong.any(), f"{self.name}, program {self.program}: {what}, {wrong.sum()} of {wrong.size}"


@contextmanager
def watched():
    """Every launch is watched; yields a list of the kernels' names."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    kept = {
        (owner, name): getattr(owner, name)
        for owner, name in (
            (executor, "_init_args_hst"), (builder, "set_grid_idx"), (builder, "create_masked_load"),
            (builder, "create_masked_store"), (builder, "create_atomic_rmw"), (builder, "create_barrier"),
        )
    }  # fmt: skip
    was = {name: function for (_, name), function in kept.items()}
    launched, now = [], None

    def arguments(self, args, options):
        nonlocal now
        made, options = was["_init_args_hst"](self, args, options)
        storages = {}

        def note(x):
            if isinstance(x, tuple):
                for one in x:
                    note(one)
            elif hasattr(x, "untyped_storage") and x.numel():
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()

        note((*made, *options.values()))
        now = Watch(self.fn.__name__, storages)
        launched.append(now.name)
        return made, options

    def program(self, x, y, z):
        now.program = x
        was["set_grid_idx"](self, x, y, z)

    def width(pointers):
        return pointers.get_element_ty().primitive_bitwidth // 8

    def load(self, pointers, mask, *rest):
        now.load(pointers, mask, width(pointers))
        return was["create_masked_load"](self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest):
        now.store(pointers, mask, width(pointers))
        return was["create_masked_store"](self, pointers, value, mask, *rest)

    def add(self, operation, pointers, value, mask, *rest):
        assert value.dtype.scalar.is_int(), f"{now.name}: adds {value.dtype.scalar} atomically"
        now.store(pointers, mask, width(pointers), shared=True)
        return was["create_atomic_rmw"](self, operation, pointers, value, mask, *rest)

    def barrier(self, *rest):
        now.barriers += 1
        return was["create_barrier"](self, *rest)

    for (owner, name), function in zip(kept, (arguments, program, load, store, add, barrier), strict=True):
        setattr(owner, name, function)
    try:
        yield launched
    finally:
        for (owner, name), function in kept.items():
            setattr(owner, name, function)
