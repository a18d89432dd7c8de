"""Part 2: `posenc.Attention` with caches. What comes chunk by chunk must be what one prefill in float64 gives.

A case is a layer (or a stack that shares one cache) and steps. Chunks are fed, caches cropped, reordered and copied,
calls fail in between (and must leave the cache as it was), autograd's mode changes, threads run with caches of their own,
and gradients go back through all chunks. Budgets: `tests.rounding`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random

import torch
from torch import Tensor

from posenc import Attention, KVCache, create
from posenc.encodings.registry import options_of
from tests import budget, rounding

ENCODINGS: dict[str, dict] = {
    "none": {},
    "sinusoidal": {},
    "learned": dict(max_length=64),
    "shaw": dict(max_distance=3, values=True),
    "clipped": dict(max_distance=4),
    "t5": dict(buckets=8, max_distance=20),
    "transformer_xl": {},
    "xlnet": {},
    "deberta": dict(max_distance=8),
    "rope": {},
    "xpos": {},
    "relative_logits": {},
    "alibi": {},
    "sinusoidal_2d": {},
    "axial": {},
    "mrope": {},
    "sinks": {},
    "tempered": dict(alpha=0.5, floor=2.0),
    "grid_bias": dict(window=(64, 10)),
    "continuous_bias": dict(window=(64, 10), hidden=3),
    "decomposed": dict(grid=(64, 10)),
    "mixed_rope": {},
    "many_axes": dict(axis_of=(0, 1, 0), text=True),
    "fox": {},
    "kerple": {},
    "sandwich": {},
    "fire": dict(threshold=4.0, hidden=5),
    "tupe": dict(max_length=128),
    "cape": dict(shift=0.0, jitter=0.0),
    "pope": {},
}
AXES = {
    "sinusoidal_2d": 2, "axial": 2, "mrope": 3, "grid_bias": 2, "continuous_bias": 2, "decomposed": 2, "mixed_rope": 2,
    "many_axes": 2,
}  # fmt: skip
PAIRS = (
    "rope",
    "mrope",
    "axial",
    "xpos",
    "mixed_rope",
    "many_axes",
    "pope",
    "sinusoidal",
    "sinusoidal_2d",
    "cape",
    "transformer_xl",
    "xlnet",
)
"""Encodings whose head size is even."""
"""Of positions that are given. Others are patch numbers of a grid with COLUMNS, or those of text (mrope)."""
COLUMNS = 5
ABSOLUTE, CAUSAL = ("sinusoidal", "learned"), ("xpos", "relative_logits", "fox")
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
FAILURES = ("mask", "width", "rows", "positions", "too long")
Step = tuple  # ("feed", n) ("crop", part) ("reorder", rows) ("fail", kind) ("copy", n) ("mode", name) ("gradient", n)


@dataclass(frozen=True)
class Case:
    data: int = 0
    encoding: str = "none"
    dtype: str = "float64"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 4
    depth: int = 1  # layers that share the cache
    causal: bool = True
    window: int | None = None
    cross: int = 0  # tokens of a context; 0: self-attention
    padding: int = 0  # at the left of the first chunk's second row
    positions: bool = False  # with gaps
    documents: bool = False
    segments: bool = False
    threads: int = 1
    steps: tuple[Step, ...] = (("feed", 1),)

    def __repr__(self) -> str:
        plain = type(self)()
        shown = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def draw(random: Random) -> Case:
    encoding = random.choice(list(ENCODINGS))
    kv_heads, group = random.choice((1, 1, 2)), random.choice((1, 2))
    causal = encoding in CAUSAL or random.random() < 0.7
    cross = random.choice((1, 5, 9)) if random.random() < 0.15 and encoding not in (*CAUSAL, "xlnet") else 0
    plain = not cross
    depth = random.choice((1, 1, 1, 2, 3)) if causal and plain else 1
    return _valid(
        Case(
            data=random.randrange(2**31),
            encoding=encoding,
            dtype="float64" if depth > 1 else random.choice(("float64", "float64", "float32")),
            batch=random.choice((1, 2, 2, 3)),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=random.choice((2, 4, 8, 16) if encoding in PAIRS else (1, 2, 3, 4, 7, 8, 16)),
            depth=depth,
            causal=causal,
            window=random.choice((2, 5, 20)) if random.random() < 0.2 else None,
            cross=cross,
            padding=random.randint(1, 4) if random.random() < 0.25 and plain else 0,
            positions=random.random() < 0.2 and plain,
            documents=random.random() < 0.2 and plain,
            segments=encoding == "xlnet" and random.random() < 0.7,
            threads=random.choice((1, 1, 1, 1, 3)),
            steps=tuple(_step(random) for _ in range(random.randint(1, 8))),
        )
    )


def _step(random: Random) -> Step:
    kinds = {"feed": 50, "crop": 12, "reorder": 10, "fail": 14, "copy": 10, "mode": 8, "gradient": 12}
    kind = random.choices(list(kinds), list(kinds.values()))[0]
    if kind == "gradient":
        return kind, random.choice((1, 1, 2, 3))
    if kind in ("feed", "copy"):
        return kind, random.choice((1, 1, 1, 2, 3, 5, 8, 17))
    if kind == "crop":
        return kind, random.choice((0, 25, 50, 90, 100))  # percent
    if kind == "reorder":
        return kind, tuple(random.randint(0, 7) for _ in range(random.randint(1, 3)))  # modulo the rows there are
    return (kind, random.choice(FAILURES)) if kind == "fail" else (kind, random.choice(list(MODES)))


def features(case: Case) -> set[str]:
    plain = Case()
    found = {field.name for field in fields(case) if getattr(case, field.name) != getattr(plain, field.name)}
    return found | {case.encoding, case.dtype} | {step[0] for step in case.steps}


def script(case: Case, engine: str, device: str) -> str:
    return (
        "from tests.fuzz import layers\nfrom tests.fuzz.layers import Case\n\n"
        f"case = {case!r}\nfor fault in layers.check(case, {engine!r}, {device!r}):\n    print(fault)\n"
    )


def simpler(case: Case) -> Iterator[Case]:
    for number in range(len(case.steps)):
        yield replace(case, steps=case.steps[:number] + case.steps[number + 1 :])
    plain = Case()
    for field in fields(case):
        if field.name != "steps" and getattr(case, field.name) != getattr(plain, field.name):
            yield _valid(replace(case, **{field.name: getattr(plain, field.name)}))
    for number, step in enumerate(case.steps):
        if step[0] in ("feed", "copy") and step[1] > 1:
            for n in dict.fromkeys((1, step[1] // 2, step[1] - 1)):
                yield replace(case, steps=case.steps[:number] + ((step[0], n),) + case.steps[number + 1 :])


def _valid(case: Case) -> Case:
    if case.heads % case.kv_heads:
        case = replace(case, kv_heads=1)
    if case.encoding in CAUSAL and not case.causal:
        case = replace(case, causal=True)
    if case.depth > 1 and not case.causal:
        case = replace(case, depth=1)
    if case.cross and case.encoding in CAUSAL:
        case = replace(case, cross=0)
    if case.segments and case.encoding != "xlnet":
        case = replace(case, segments=False)
    if case.encoding in AXES and case.head_dim < 8:  # pairs for every axis
        case = replace(case, head_dim=8)
    return case


# ---- running -------------------------------------------------------------------------------------------------------
def check(case: Case, engine: str = "auto", device: str = "cpu") -> list[str]:
    """What is wrong; nothing where all is right."""
    generator = torch.Generator().manual_seed(case.data)
    stack = torch.nn.ModuleList(_layer(case, engine, generator) for _ in range(case.depth)).to(device)
    truth = copy.deepcopy(stack).double()
    for layer in truth:
        layer.engine = "reference"
    faults: list[list[str]] = [[] for _ in range(case.threads)]

    def run(number: int) -> None:
        try:
            faults[number] = _Sequence(case, stack, truth, device, case.data + number).run()
        except Exception as error:
            faults[number] = [f"raised {type(error).__name__}: {error}"]

    if case.threads == 1:
        faults = [_Sequence(case, stack, truth, device, case.data).run()]
    else:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(case.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [fault for found in faults for fault in found]


def _layer(case: Case, engine: str, generator: torch.Generator) -> Attention:
    width = case.heads * case.head_dim
    options = dict(ENCODINGS[case.encoding])
    if case.encoding == "t5":  # buckets of later keys are for layers that see some
        options["causal"] = case.causal and not case.cross
    if case.encoding in ("sinusoidal_2d", "axial", "mixed_rope") and not case.positions:
        options["columns"] = COLUMNS
    if "kv_heads" in options_of(case.encoding):
        options["kv_heads"] = case.kv_heads
    position = None
    if case.encoding != "none":
        position = create(case.encoding, d_model=width, heads=case.heads, head_dim=case.head_dim, **options)
    layer = Attention(
        width, case.heads, kv_heads=case.kv_heads, encoding=position, causal=case.causal, window=case.window,
        engine=engine,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in layer.parameters():
            size = width**-0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(_real(generator, *parameter.shape) * size)
    return layer.to(getattr(torch, case.dtype)).eval()


def _real(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**23), 2**23 + 1, shape, generator=generator).double() / 2**22


class _Sequence:
    """One cache and the tokens that it should know."""

    def __init__(self, case: Case, stack, truth, device: str, data: int):
        self.case, self.stack, self.truth, self.device = case, stack, truth, device
        self.generator = torch.Generator().manual_seed(data + 1)
        self.cache = KVCache()
        self.width = case.heads * case.head_dim
        self.dtype = getattr(torch, case.dtype)
        self.known = {"x": self._real(case.batch, 0, self.width), **self._facts(case.batch, 0, 0)}
        self.context = self._real(case.batch, case.cross, self.width) if case.cross else None
        self.mode = "no_grad"
        self.faults: list[str] = []

    def _real(self, *shape: int) -> Tensor:
        return _real(self.generator, *shape).to(self.device, self.dtype)

    def _facts(self, rows: int, past: int, count: int, last: dict | None = None) -> dict[str, Tensor]:
        """The arguments for `count` new tokens, except the tokens themselves."""
        case, facts = self.case, {}
        whole = lambda low, high: torch.randint(low, high + 1, (rows, count), generator=self.generator).to(self.device)  # noqa: E731
        before = lambda name: last[name][:, -1:] if last and last[name].shape[1] else torch.zeros(rows, 1).long()  # noqa: E731
        axes = AXES.get(case.encoding, 1)
        if case.positions and axes == 1:
            facts["positions"] = before("positions").to(self.device) + whole(1, 2).cumsum(1)
        elif case.positions:
            facts["positions"] = torch.stack([whole(0, 9) for _ in range(axes)], -1)
        if case.documents:
            facts["documents"] = before("documents").to(self.device) + (whole(0, 6) == 0).long().cumsum(1)
        if case.segments:
            facts["segments"] = whole(0, 1)
        if case.padding:
            keep = torch.ones(rows, count, dtype=torch.bool, device=self.device)
            if past == 0 and rows > 1:
                keep[1, : min(case.padding, max(0, count - 1))] = False
            facts["key_mask"] = keep
        return facts

    def run(self) -> list[str]:
        for number, step in enumerate(self.case.steps):
            try:
                self._take(step)
            except Exception as error:
                self.faults.append(f"raised {type(error).__name__}: {error} at step {number} {step}")
            if self.faults:
                break
        return self.faults

    def _take(self, step: Step) -> None:
        kind = step[0]
        if kind == "feed":
            self._feed(step[1])
        elif kind == "crop" and self.context is None:
            self._crop(self.known["x"].shape[1] * step[1] // 100)
        elif kind == "reorder":
            self._reorder(torch.tensor([row % self.known["x"].shape[0] for row in step[1]], device=self.device))
        elif kind == "fail":
            self._fail(step[1])
        elif kind == "copy":
            self._branch(step[1])
        elif kind == "gradient":
            self._gradients(step[1])
        elif kind == "mode":
            self.mode = step[1]

    def _call(self, stack, x: Tensor, cache, facts: dict, context: Tensor | None) -> Tensor:
        for layer in stack:
            # the first layer's input is all that is cached of facts; a stack shares them
            y = layer(x, cache=cache, **facts) if context is None else layer(x, context, cache=cache, **facts)
            x = y if len(stack) == 1 else x + y
        return x

    def _feed(self, count: int) -> None:
        rows, past = self.known["x"].shape[:2]
        if self.case.encoding == "learned" and past + count > ENCODINGS["learned"]["max_length"] // 2:
            return  # positions with gaps go twice as far
        x = self._real(rows, count, self.width)
        facts = self._facts(rows, past, count, self.known)
        with MODES[self.mode]():
            y = self._call(self.stack, x, self.cache, facts, self.context)
        self.known = {n: torch.cat((self.known[n], new), 1) for n, new in {"x": x, **facts}.items()}
        self._compare(y, count)

    def _compare(self, y: Tensor, count: int) -> None:
        facts = {name: x for name, x in self.known.items() if name != "x"}
        context = None if self.context is None else self.context.double()

        def run() -> dict[str, Tensor]:
            return {"y": self._call(self.truth, self.known["x"].double(), None, facts, context)[:, -count:]}

        with torch.no_grad():
            exact, allowed = rounding.expect(run, self.dtype)
        y, expected, real = y.detach().clone(), exact["y"], facts.get("key_mask")
        if real is not None:  # what is computed at padding is nobody's output
            real = real[:, -count:, None]
            y, expected = torch.where(real, y, 0.0), torch.where(real, expected, 0.0)
        self._assert(y, expected, allowed["y"], f"tokens {self.known['x'].shape[1] - count} to the end")

    def _assert(self, ours: Tensor, expected: Tensor, allowed: Tensor, name: str) -> None:
        try:
            budget.assert_within(ours, expected, allowed, name)
        except AssertionError as error:
            self.faults.append(str(error))

    def _gradients(self, chunks: int) -> None:
        """Of every parameter and token, through a cache that is filled in `chunks` calls, against one call without it."""
        facts = {name: x for name, x in self.known.items() if name != "x"}
        x, context = self.known["x"], self.context
        length = x.shape[1]
        if length == 0:
            return
        weights = self._real(*x.shape)
        if "key_mask" in facts:
            weights = weights * facts["key_mask"][..., None]
        if not self.case.causal or context is not None:
            chunks = 1  # earlier chunks would not see later keys

        def run(stack, dtype: torch.dtype, chunks: int) -> dict[str, Tensor]:
            leaves = {"x": x.to(dtype, copy=True).requires_grad_(), **dict(stack.named_parameters())}
            if context is not None:
                leaves["context"] = context.to(dtype, copy=True).requires_grad_()
            cache, y = KVCache() if chunks > 1 else None, []
            with torch.inference_mode(False), torch.enable_grad():
                for part in torch.arange(length).chunk(chunks):
                    own = slice(int(part[0]), int(part[-1]) + 1)
                    given_facts = {name: fact[:, own] for name, fact in facts.items()}
                    y.append(self._call(stack, leaves["x"][:, own], cache, given_facts, leaves.get("context")))
                given = weights.to(dtype)
                found = torch.autograd.grad(torch.cat(y, 1), list(leaves.values()), given, allow_unused=True)
            pairs = zip(leaves.items(), found, strict=True)
            return {name: torch.zeros_like(leaf) if one is None else one for (name, leaf), one in pairs}

        exact, allowed = rounding.expect(lambda: run(self.truth, torch.float64, 1), self.dtype)
        # over a single key the gradient of a query is zero in theory (float64: rounding of the others), and parts that cancel
        # leave their own rounding: a few of them. No other gradient is allowed more.
        largest = max(float(one.abs().max()) for one in exact.values() if one.numel())
        parts = 4.0 * largest * torch.finfo(self.dtype).eps
        for name, ours in run(self.stack, self.dtype, chunks).items():
            is_zero = exact[name].numel() == 0 or float(exact[name].abs().max()) <= 1e-12 * largest
            self._assert(ours, exact[name], allowed[name] + parts * is_zero, f"the gradient of {name}")

    def _crop(self, length: int) -> None:
        if self.known["x"].shape[1] == 0:
            return
        self.cache.crop(length)
        self.known = {name: x[:, :length] for name, x in self.known.items()}

    def _reorder(self, rows: Tensor) -> None:
        if self.known["x"].shape[1] == 0:
            return
        self.cache.reorder(rows)
        self.known = {name: x[rows] for name, x in self.known.items()}
        self.context = None if self.context is None else self.context[rows]

    def _branch(self, count: int) -> None:
        """A copy goes on by itself; then the first one does, as if nothing had been."""
        if self.known["x"].shape[1] == 0:
            return
        ours = self.cache, self.known, self.context
        self.cache = copy.copy(self.cache)
        self._feed(count)
        self.cache, self.known, self.context = ours
        self._feed(1)

    def _fail(self, kind: str) -> None:
        """A call that must raise and leave the cache as it was; the steps after it would show otherwise."""
        rows, past = self.known["x"].shape[:2]
        count, options = 2, {}
        x = self._real(rows, count, self.width)
        facts = self._facts(rows, past, count, self.known)
        if kind == "mask":
            options["mask"] = torch.ones(3, 3, dtype=torch.bool, device=self.device).expand(7, 1, 3, 3)
        elif kind == "width":
            x = x[..., :-1]
        elif kind == "rows":
            x = self._real(rows + 1, count, self.width)
            if past == 0 and self.context is None and (not facts or rows == 1):
                return  # a new cache takes any number of rows, and one row of facts may stand for all
        elif kind == "positions":
            options["positions"] = torch.zeros(rows, count + 3, dtype=torch.int64, device=self.device)
        elif kind == "too long":
            if self.case.encoding != "learned" or self.context is not None or self.case.documents:
                return  # documents may be counted one by one
            x = self._real(rows, ENCODINGS["learned"]["max_length"] + 1, self.width)
            facts = self._facts(rows, past, x.shape[1], self.known)
        try:
            with MODES[self.mode]():
                self._call(self.stack, x, self.cache, {**facts, **options}, self.context)
        except (ValueError, IndexError):
            return
        self.faults.append(f"a call that cannot be right ({kind}) did not raise")
