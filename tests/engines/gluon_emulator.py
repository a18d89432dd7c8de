"""Runs the Gluon kernels' own source on a CPU: a thread for each role, tensors for registers, barriers that count phases.

Gluon has no interpreter. `load()` executes kernel.py (and prepare.py, which is plain Triton; then others) with stand-ins for Triton's modules: `gluon.jit` returns the function as it is,
shared memory is a tensor, a copy by TMA fills zeros outside its tensor, wgmma multiplies in float32, and a role that waits for a phase
that never comes raises `Deadlock`. It checks the schedule, indices, masks and barriers' phases; not layouts, registers or timing.
"""

from __future__ import annotations

import ast
import sys
import threading
import types
from pathlib import Path

import torch

from posenc.engines.gluon.skew import write_skew

ENGINES = Path(__file__).parents[2] / "src" / "posenc" / "engines"
PATIENCE = 5.0  # seconds without progress: a deadlock


class Deadlock(RuntimeError):
    """A role waits for what no other will do."""


class Constant(int):
    """A constexpr."""

    @property
    def value(self):
        return int(self)


class Register:
    """A tensor or a number in registers."""

    type = types.SimpleNamespace(layout=None)
    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: tuple(self.data.shape))

    def __init__(self, data):
        self.data = data

    def to(self, dtype, bitcast=False):
        if not isinstance(self.data, torch.Tensor):
            return Register(self.data)
        return Register(self.data.view(dtype) if bitcast else self.data.to(dtype))


def raw(x):
    return x.data if isinstance(x, Register) else x


def number(x):
    return int(x) if isinstance(x, (torch.Tensor, Register)) else x


def _operator(name):
    def apply(a, b):
        a, b = raw(a), raw(b)
        if isinstance(b, Pointer):
            return NotImplemented
        value = getattr(torch, name)(torch.as_tensor(a), torch.as_tensor(b))
        return Register(value)

    return apply


for _method, _name in {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "mod": "remainder",
    "floordiv": "floor_divide",
    "eq": "eq",
    "ne": "ne",
    "ge": "ge",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "lshift": "bitwise_left_shift",
    "truediv": "div",
}.items():
    _forward = _operator(_name)
    setattr(Register, f"__{_method}__", _forward)
    if _method in ("add", "sub", "mul", "truediv", "lshift"):
        setattr(Register, f"__r{_method}__", lambda a, b, forward=_forward: forward(b, a))
Register.__bool__ = lambda self: bool(self.data)
Register.__neg__ = lambda self: Register(-self.data)
Register.__getitem__ = lambda self, at: Register(self.data[at])


class Integer(int):
    """A number of the kernel."""

    def to(self, dtype):
        return float(self) if dtype.is_floating_point else self


def _closed(name):
    def apply(a, b):
        value = getattr(int, name)(a, b)
        return value if value is NotImplemented else Integer(value)

    return apply


for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"):
    setattr(Integer, f"__{name}__", _closed(f"__{name}__"))


class Pointer:
    """An address in a tensor's memory."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, step):
        return Pointer(self.memory, raw(step) + self.at)

    def to(self, dtype, bitcast):
        return self

    @property
    def dtype(self):
        return types.SimpleNamespace(element_ty=self.memory.dtype)


class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all expected bytes are there."""

    def __init__(self):
        self.phase, self.pending, self.count, self.bytes = 0, 0, 0, 0

    def init(self, count):
        self.count = self.pending = count

    def arrive(self, machine, expected=0, received=0, arrivals=1):
        with machine.lock:
            self.bytes += expected - received
            self.pending -= arrivals
            if self.pending < 0:
                raise Deadlock("a barrier had more arrivals than its phase has")
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                machine.lock.notify_all()

    def wait(self, machine, parity):
        machine.wait_until(lambda: (self.phase & 1) != parity)


class Named:
    """A named barrier of 256 threads: 128 that wait and 128 that arrived."""

    def __init__(self):
        self.arrived = self.left = 0


class Memory:
    """Shared memory."""

    def __init__(self, data):
        self.data = data
        self.shape, self.dtype = (
            tuple(data.shape) if isinstance(data, torch.Tensor) else (len(data), 1),
            getattr(data, "dtype", None),
        )

    def index(self, at):
        return self.data[number(at)] if isinstance(self.data, list) else Memory(self.data[number(at)])

    def reshape(self, shape):
        return Memory(self.data.view(*shape))

    def permute(self, order):
        return Memory(self.data.permute(*order))

    def slice(self, start, length, dim):
        return Memory(self.data.narrow(dim, start, length))

    def load(self, layout):
        return Register(self.data.clone())

    def store(self, value):
        self.data.copy_(raw(value))


class Descriptor:
    """A tensor in global memory and the blocks in which it is copied."""

    layout = None

    def __init__(self, x, rows, columns=None):
        columns = columns or x.shape[-1]
        self.x, self.rows, self.dtype, self.block_shape = (
            x.detach(),
            rows,
            x.dtype,
            [1] * (x.dim() - 2) + [rows, columns],
        )
        self.block_type = types.SimpleNamespace(nbytes=rows * columns * x.element_size())

    def part(self, at, is_read=False):
        """What a copy reads or writes, and at which of the block's rows it begins. Columns before the first are read as zeros."""
        if self.x.dim() == 2:
            row, column = map(number, at)
            assert column * self.x.element_size() % 16 == 0, "a copy that begins at no multiple of 16 bytes"
            width = self.block_shape[-1]
            assert row >= 0 and (column >= 0 or is_read), "a tile outside its tensor"
            rows = self.x[row : row + self.rows, max(column, 0) : max(column + width, 0)]
            return (torch.nn.functional.pad(rows, (min(-column, width), 0)) if column < 0 else rows), 0
        *which, first, _ = map(number, at)
        length = self.x.shape[-2]
        inside = min(max(first, 0), length), max(min(first + self.rows, length), 0)
        return self.x[(*which, slice(inside[0], max(inside)))], inside[0] - first


class Machine:
    """One program: its roles as threads."""

    def __init__(self, program, programs):
        self.lock = threading.Condition()
        self.program, self.programs, self.errors = program, programs, []
        self.named: dict[int, Named] = {}

    def wait_until(self, ready):
        with self.lock:
            if not self.lock.wait_for(lambda: ready() or self.errors, PATIENCE) or not ready():
                raise Deadlock("a role waits for ever" if not self.errors else "another role failed")

    def run(self, roles):
        def role(function, args):
            try:
                current.machine = self
                function(*args)
            except BaseException as error:
                with self.lock:
                    self.errors.append(error)
                    self.lock.notify_all()

        threads = [threading.Thread(target=role, args=one) for one in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


current = threading.local()


def _reduce(function):
    def apply(x, axis):
        value = function(x.data, axis)
        return Register(value) if value.dim() or value.dtype.is_floating_point else Integer(value)

    return apply


def _expect(barrier, nbytes, pred=True):
    if bool(raw(pred)):
        barrier.arrive(current.machine, expected=nbytes)


def _load(desc, at, barrier, result, pred=True):
    if bool(raw(pred)):
        part, first = desc.part(at, is_read=True)
        block = torch.zeros_like(result.data)
        block.view(-1, block.shape[-1])[first : first + len(part), : part.shape[-1]] = part
        result.data.copy_(block)
        barrier.arrive(current.machine, received=desc.block_type.nbytes, arrivals=0)


def _store(desc, at, source):
    part, first = desc.part(at)
    part.copy_(source.data.view(-1, source.shape[-1])[first : first + len(part)])


def _add(desc, at, source):
    desc.x[number(at[0]) : number(at[0]) + desc.rows] += source.data


def _sum_diagonals(x):
    """[64, eights, 8]: in the first eight of a row, the sums that backward_diagonals.py has there, as integers; zeros elsewhere."""
    out, count = torch.zeros_like(x), x.shape[1] // 4 + 1
    tile = x.reshape(4, 16, -1)
    distance = torch.arange(16)[:, None] - torch.arange(tile.shape[2])
    for row in range(64):
        for column in range(8):
            c, k = column // 2, row // 8 % 2 * 2 + column % 2
            r = (row % 8 + c // 2 * 4 - c % 2 * 2) % 8 + 8 - 8 * (count * c + k)
            if k < count:
                out[row, 0, column] = tile[row // 16][distance == r].sum()
    return out.view(torch.int32)


def _assembly(text, constraints, args, **options):
    """bar.sync and bar.arrive of 256 threads, additions to memory, sums of eight rows, skew.py and backward_diagonals.py."""
    if "shfl" in text and len(args) == 1:
        return Register(_sum_diagonals(args[0].data))
    if "shfl" in text:
        i, j = torch.arange(64)[:, None], torch.arange(64)
        at = i + j if text == write_skew(back=True)[0] else j - i + 64
        return Register(torch.cat([x.data for x in args[:2]], 1).gather(1, at))
    if "red." in text:
        pointer, x = args
        pointer.memory.index_put_((pointer.at,), x.data, accumulate=True)
        return
    if "ld.global.v2" in text:
        pointer, step = args
        at = pointer.at + step.data // 4 * torch.arange(8)[:, None]
        assert int(at.min()) >= 0 and int(at.max()) + 1 < pointer.memory.numel(), "a read outside a tensor"
        return Register(pointer.memory[at].sum(0)), Register(pointer.memory[at + 1].sum(0))
    machine, at = current.machine, number(args[0])
    with machine.lock:
        named = machine.named.setdefault(at, Named())
    if "bar.arrive" in text:
        with machine.lock:
            named.arrived += 1
            machine.lock.notify_all()
    else:
        machine.wait_until(lambda: named.arrived > named.left)
        named.left += 1


def _multiply(a, b, acc, use_acc=True, is_async=False):
    product = a.data.float() @ b.data.float()
    return Register(product + acc.data if raw(use_acc) else product)


def _either(condition, a, b):
    condition, a, b = raw(condition), raw(a), raw(b)
    if not isinstance(condition, torch.Tensor):
        value = a if condition else b
        return (
            Register(value) if isinstance(value, torch.Tensor) else Integer(value) if isinstance(value, int) else value
        )
    return Register(torch.where(condition, torch.as_tensor(a), torch.as_tensor(b)))


def _extremum(scalar, tensor):
    def apply(a, b):
        if not isinstance(a, Register) and not isinstance(b, Register):
            return Integer(scalar(a, b))
        return Register(tensor(torch.as_tensor(raw(a)), torch.as_tensor(raw(b))))

    return apply


def _read(pointer, mask=None, other=None):
    at = pointer.at
    if not isinstance(at, torch.Tensor):
        value = pointer.memory[at]
        return Register(value) if value.dtype.is_floating_point else Integer(value)
    if mask is not None:
        keep, at = torch.broadcast_tensors(raw(mask), at)
        at = torch.where(keep, at, 0)
    assert int(at.min()) >= 0 and int(at.max()) < pointer.memory.numel(), "a read outside a tensor"
    value = pointer.memory[at]
    return Register(value if mask is None else torch.where(keep, value, other))


def _write(pointer, value, mask=True):
    at, value, keep = torch.broadcast_tensors(*map(torch.as_tensor, (raw(pointer.at), raw(value), raw(mask))))
    pointer.memory[at[keep]] = value[keep].to(pointer.memory.dtype)


def _add_to(pointer, value, sem, mask=True):
    at, value, keep = torch.broadcast_tensors(raw(pointer.at), value.data, torch.as_tensor(raw(mask)))
    with current.machine.lock:
        pointer.memory.index_put_((at[keep],), value[keep], accumulate=True)


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Memory([Barrier() for _ in range(shape[0])])
    return Memory(torch.full([int(x) for x in shape], float("nan")).to(dtype))


def _stand_ins():
    gl = types.SimpleNamespace(
        constexpr=lambda x: x if isinstance(x, str) else Constant(x), int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
        where=_either, minimum=_extremum(min, torch.minimum), maximum=_extremum(max, torch.maximum),
        inline_asm_elementwise=_assembly, max=_reduce(lambda x, axis: x.amax(axis)),
        min=_reduce(lambda x, axis: x.amin(axis)), cdiv=lambda a, b: Integer(-(-a // b)), sum=_reduce(lambda x, axis: x.sum(axis, dtype=x.dtype)),
        reshape=lambda x, shape: Register(x.data.reshape(*shape)), convert_layout=lambda x, layout: x,
        expand_dims=lambda x, axis: Register(torch.as_tensor(raw(x)).unsqueeze(axis)), SliceLayout=lambda *args: None,
        NVMMADistributedLayout=lambda *args: None, NVMMASharedLayout=lambda *args: None, BlockedLayout=lambda *args: None, DotOperandLayout=lambda *args: None,
        arange=lambda first, last, layout=None: Register(torch.arange(first, last)), load=_read, store=_write, atomic_add=_add_to,
        exp2=lambda x: Register(raw(x).exp2()), log2=lambda x: Register(raw(x).log2()), abs=lambda x: Register(raw(x).abs()),
        permute=lambda x, order: Register(x.data.permute(*order)), trans=lambda x: Register(x.data.T),
        join=lambda a, b: Register(torch.stack((a.data, b.data), -1)),
        zeros=lambda shape, dtype, layout=None: Register(torch.zeros(*shape, dtype=dtype)),
        zeros_like=lambda x: Register(torch.zeros_like(x.data)),
        full=lambda shape, value, dtype, layout: Register(torch.full(list(shape), value, dtype=dtype)),
        static_range=range, program_id=lambda axis: Integer(current.machine.program),
        num_programs=lambda axis: Integer(current.machine.programs), allocate_shared_memory=_allocate, thread_barrier=lambda: None,
        warp_specialize=lambda roles, warps, registers: current.machine.run(roles),
    )  # fmt: skip
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda barrier, count: barrier.init(count), expect=_expect,
        arrive=lambda barrier, pred=True: raw(pred) and barrier.arrive(current.machine), wait=lambda barrier, phase: barrier.wait(current.machine, number(phase)),
    )  # fmt: skip
    tma = types.SimpleNamespace(
        async_copy_global_to_shared=_load, async_copy_shared_to_global=_store, store_wait=lambda pending: None
    )  # fmt: skip

    def wait(pending, deps):
        return deps[0] if len(deps) == 1 else deps

    return gl, dict(
        fence_async_shared=lambda: None, mbarrier=mbarrier, tma=tma, warpgroup_mma=_multiply, warpgroup_mma_wait=wait
    )  # fmt: skip


def _replaced(node):
    """Whether it imports what the stand-ins or the files beside it give."""
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or node.module.split(".")[0] == "triton"
    return isinstance(node, ast.Import) and any(x.name.split(".")[0] == "triton" for x in node.names)


def load(*names):
    """The kernels of prepare.py, kernel.py and the files named, as plain functions: one module, and in its `files` a namespace for each file."""
    gl, hopper = _stand_ins()
    jit = lambda function=None, **options: function or (lambda inner: inner)  # noqa: E731
    triton = types.SimpleNamespace(
        jit=jit, constexpr_function=jit, next_power_of_2=lambda x: 1 << (int(x) - 1).bit_length()
    )
    module = types.ModuleType("gluon_kernel")
    module.files = {}
    sys.modules["gluon_kernel"] = module

    def run(path):
        """What a file defines, and what it imports from files beside it."""
        if path.stem not in module.files:
            space = module.files[path.stem] = {
                "__name__": "gluon_kernel",
                "gl": gl,
                "tl": gl,
                "gluon": triton,
                "triton": triton,
                "builtin": jit,
                **hopper,
            }
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in (x for x in tree.body if isinstance(x, ast.ImportFrom) and x.level):
                given = run((path.parents[node.level - 1] / node.module.replace(".", "/")).with_suffix(".py"))
                space.update({x.asname or x.name: given[x.name] for x in node.names})
            tree.body = [x for x in tree.body if not _replaced(x)]
            exec(compile(tree, str(path), "exec"), space)
            if "async_add" in space:
                space["async_add"] = _add
        return module.files[path.stem]

    for name in ("prepare.py", "kernel.py", *names):
        module.__dict__.update(run(ENGINES / "gluon" / name))
    return module


def describe(x):
    """A TensorDescriptor as `launch` takes it."""
    if len(x.shape) == 2:  # rows of a band overlap
        columns = min(x.shape[1], x.base.numel() - (x.shape[0] - 1) * x.strides[0])  # all that there is in memory
        return x.base.as_strided((x.shape[0], columns), x.strides), *x.block_shape
    return x.base, *x.block_shape[-2:]


def _given(x):
    """An argument as a kernel gets it."""
    if isinstance(x, torch.Tensor):
        if not x.is_contiguous():  # all memory from its first element on
            begin = x.storage_offset()
            x = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - begin,), (1,), begin)
        return Pointer(x.detach().view(-1))
    if isinstance(x, tuple):
        return type(x)(*map(_given, x))
    return Integer(x) if isinstance(x, int) else getattr(x, "value", x)


def launch(module, kernel, programs, args, constants):
    """A kernel over all its programs, one after another. Descriptors: (tensor, rows of a block, and columns)."""
    function = module.files[kernel.__module__.rpartition(".")[2]][kernel.__name__]
    args = [Descriptor(*x) if type(x) is tuple else _given(x) for x in args]
    for program in range(programs):
        current.machine = Machine(program, programs)
        function(*args, **{name: Constant(x) for name, x in constants.items()})


def emulate(module):
    """A launch(...) as in triton/launcher.py."""

    def run(called, programs, *args, **constants):
        constants.pop("num_warps", None)
        args = [describe(x) if type(x).__name__ == "TensorDescriptor" else x for x in args]
        launch(module, called, programs, args, constants)

    return run


def set_processors(monkeypatch, number):
    """A device with so many processors."""
    found = types.SimpleNamespace(multi_processor_count=number)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def document_bounds(own, other):
    rows, length = max(own.shape[0], other.shape[0]), other.shape[1]
    ascending = (other[:, 1:] >= other[:, :-1]).all(-1, keepdim=True)
    own, other = own.expand(rows, -1).contiguous(), other.expand(rows, -1).contiguous()
    first, last = torch.searchsorted(other, own), torch.searchsorted(other, own, right=True)
    return torch.stack((first.where(ascending, -1), last.where(ascending, length)), -1).to(torch.int32)


def with_bounds(inputs):
    """The same with padding as bytes, and the bounds of real keys and of documents as padding.py has them."""
    if inputs.doc_q is not None:
        ids = inputs.doc_q, inputs.doc_k
        inputs = inputs._replace(doc_q_keys=document_bounds(*ids), doc_k_queries=document_bounds(*ids[::-1]))
    if inputs.key_mask is None:
        return inputs
    real = inputs.key_mask
    ends = [
        (int(x.nonzero().min()) if x.any() else len(x), int(x.nonzero().max()) + 1 if x.any() else 0, x.sum())
        for x in real
    ]
    bounds = torch.tensor([(first, end, count == end - first) for first, end, count in ends], dtype=torch.int32)
    return inputs._replace(key_mask=real.to(torch.uint8), key_bounds=bounds.expand(len(inputs.q), 3).contiguous())
