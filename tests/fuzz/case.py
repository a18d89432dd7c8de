"""A case of attention as plain data, and how one is drawn. Every field has a value that means "nothing of it"."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random

SLOTS = ("bias", "dot_query", "states", "dot_key", "add_value", "query_shift")
LAYOUTS = ("length first", "channels first", "slice", "every other", "one row", "one token")


@dataclass(frozen=True)
class Table:
    """A Lookup. kind and its numbers:

    clip (left, right) | rows (lo, hi, n) | log (buckets, most, causal) | deberta (size, most) | exact (most or -1,)
    axis (axis, left, right) | grid (left, right of each axis ...)
    """

    kind: str = "clip"
    numbers: tuple[int, ...] = (2, 2)
    slots: tuple[str, ...] = ("bias",)
    shared: bool = False  # one table for all heads
    width: int = 8  # of states


@dataclass(frozen=True)
class Rotate:
    layout: str = "half"
    pairs: int = 1
    values: bool = False
    sides: str = "one"  # one (q and k share it) | both | q | k
    per_row: bool = False
    magnitude: bool = False


@dataclass(frozen=True)
class Case:
    data: int = 0  # seed of the numbers
    dtype: str = "float64"
    table_dtype: str = "float64"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    lq: int = 1
    lk: int = 1
    size: int = 1
    v_size: int = 1
    magnitude: float = 1.0  # of q and k
    # positions: aligned | run (q start, k start) | starts | tensor
    positions: str = "aligned"
    start: int = 0
    ahead: int = 0  # the queries are so much further on
    order: str = "in order"  # of tensors: in order | gaps | repeated | shuffled
    rank: str = "L"  # of tensors: L | 1L | BL
    axes: tuple[int, ...] = ()  # further axes: different positions on each
    # plan
    tables: tuple[Table, ...] = ()
    slopes: bool = False
    decay: str = ""  # random | gates
    scale: float | str | None = None  # a number | one | H | HL | BHL
    shift: bool = False
    rotate: Rotate | None = None
    pair: bool = False
    # mask
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    padding: str = ""  # right | left | holes | empty (with a fully padded row) | shared
    documents: str = ""  # sorted | shuffled | foreign (queries' own ids)
    document: int = 6  # tokens of one, on average
    mask: str = ""  # bool | added | infinite (added, with -inf)
    mask_dims: str = "BHQK"  # which sizes are not 1
    # how it is called
    layouts: tuple[str, str, str] = ("", "", "")
    wanted: tuple[str, ...] | None = None  # gradients; None: all
    summed: bool = False  # the gradient of the output is one number, expanded
    lse: bool = False
    dropout: float = 0.0
    blocks: int = 0  # sizes of the cpu and blocked engines' blocks, so that few tokens are many blocks; 0: their own
    poison: bool = False  # fresh memory holds NaN
    hopper: bool = False  # engines/gluon's kernel serves any length

    def __repr__(self) -> str:
        """The fields that are not their defaults."""
        plain = type(self)()
        shown = [f for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


def draw(random: Random) -> Case:
    """A case that can be run; mostly small, now and then up to a thousand keys."""
    batch, kv_heads, group = random.choice((1, 1, 2, 2, 3)), random.choice((1, 1, 2, 3)), random.choice((1, 1, 2, 3))
    lq, lk = _lengths(random)
    while batch * kv_heads * group * lq * lk > MOST_PAIRS and batch * kv_heads * group > 1:
        batch, kv_heads, group = max(1, batch - 1), max(1, kv_heads - 1), max(1, group - 1)
    size, v_size = _head(random), _head(random)
    if random.random() < 0.5:
        v_size = size
    dtype = random.choices(("float32", "float64", "bfloat16", "float16"), (5, 2, 2, 1))[0]
    precise = "float64" if dtype == "float64" else "float32"
    case = Case(
        data=random.randrange(2**31),
        dtype=dtype,
        table_dtype=precise if random.random() < 0.7 else dtype,
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        lq=lq,
        lk=lk,
        size=size,
        v_size=v_size,
        magnitude=random.choices((1.0, 0.01, 4.0, 30.0, 100.0), (70, 5, 20, 3, 2))[0] if dtype != "float16" else 1.0,
    )
    case = _positions(random, case)
    case = _plan(random, case)
    case = _mask(random, case)
    case = _call(random, case)
    return _query_shifts(random, case)


def resize(case: Case, random: Random) -> Case:
    """The same structure with other lengths, offsets and numbers: what a compiled kernel serves without compiling again."""
    lq, lk = _lengths(random)
    while case.batch * case.heads * lq * lk > MOST_PAIRS:
        lq, lk = (lq + 1) // 2, (lk + 1) // 2
    if case.rotate is not None and case.rotate.sides == "one":
        lq = lk
    start, ahead = random.choice((0, 5, -9, 1000, 2**30)), random.choice((0, 3, -7, 40))
    if case.positions == "aligned":
        start, ahead = case.start, case.ahead
    return replace(case, lq=lq, lk=lk, data=random.randrange(2**31), start=start, ahead=ahead)


def for_hopper(case: Case, random: Random) -> Case:
    """The same with what engines/gluon's kernels compute alone: half precision, heads of 64 or 128, biases and slopes, or one table of content
    terms. Where gradients are wanted, fresh memory holds anything: deterministic algorithms, which fill it, take other kernels."""
    size = random.choice((64, 128))
    tables = tuple(replace(table, slots=("bias",)) for table in case.tables if table.kind not in ("axis", "grid"))
    wanted = () if random.random() < 0.3 else None
    case = replace(
        case, hopper=True, poison=case.poison and wanted is not None, size=size, v_size=size, dtype=random.choice(("bfloat16", "bfloat16", "float16")), table_dtype="float32",
        tables=tables, positions="run" if case.positions == "tensor" else case.positions, axes=(), decay="", shift=False, rotate=None,
        scale=case.scale if isinstance(case.scale, float) else None, pair=False, mask="", dropout=0.0, wanted=wanted, lse=True, magnitude=1.0,
    )  # fmt: skip
    if random.random() < 0.6:
        return case
    slots, numbers = random.choice(HOPPER_SLOTS), random.choice(HOPPER_SPANS)
    positions = "run" if case.positions == "starts" else case.positions
    return replace(
        case, tables=(Table("clip", numbers, slots, random.random() < 0.3, 16),), slopes=False, positions=positions, poison=False,
        causal=case.causal or sum(numbers) < 128,
    )  # fmt: skip


HOPPER_SLOTS = (
    ("dot_query",), ("dot_query", "bias"), ("dot_query", "states"), ("dot_key",), ("dot_query", "dot_key"), ("dot_query", "add_value"),
)  # fmt: skip
HOPPER_SPANS = ((64, 64), (90, 40), (20, 20), (150, 140), (300, 200))


MOST_PAIRS = 200_000
SMALL_PAIRS = 3_000  # for interpreted kernels


def _lengths(random: Random) -> tuple[int, int]:
    def length() -> int:
        part = random.random()
        if part < 0.55:
            return random.randint(1, 12)
        if part < 0.85:
            return random.choice((13, 16, 17, 31, 32, 33, 40, 47, 63, 64, 65, 70))
        if part < 0.97:
            return random.choice((96, 100, 127, 128, 129, 150, 207))
        return random.choice((255, 257, 300, 511, 513, 700, 1000))

    part, lk = random.random(), length()
    if part < 0.4:
        return lk, lk
    if part < 0.5:
        return 1, lk
    if part < 0.51:
        return random.choice(((0, lk), (lk, 0)))
    lq = length()
    if lq > lk and random.random() < 0.7:
        lq, lk = lk, lq
    return lq, lk


def _head(random: Random) -> int:
    return random.choice((1, 2, 3, 4, 5, 7, 8, 8, 12, 16, 16, 16, 17, 24, 32, 33, 64))


def _positions(random: Random, case: Case) -> Case:
    kind = random.choices(("aligned", "run", "starts", "tensor"), (40, 20, 15, 25))[0]
    start = random.choice((0, 0, 5, -9, 1000, 2**30 - 3, 2**30, -(2**30)))
    ahead = random.choice((0, 0, 3, -7, 40, 10**6))
    order = random.choice(("in order", "gaps", "repeated", "shuffled"))
    axes = tuple(random.randint(1, 4) for _ in range(random.choices((0, 1, 2), (75, 17, 8))[0]))
    rank = random.choice(("L", "1L", "BL"))
    if kind == "aligned":
        return replace(case, axes=axes)
    if kind != "tensor":
        return replace(case, positions=kind, start=start, ahead=ahead, axes=axes)
    return replace(case, positions=kind, start=start, ahead=ahead, order=order, rank=rank, axes=axes)


def _plan(random: Random, case: Case) -> Case:
    count = random.choices((0, 1, 2, 3), (25, 45, 20, 10))[0]
    tables = tuple(_table(random, case) for _ in range(count))
    rotate = None
    if min(case.size, case.v_size) >= 2 and random.random() < 0.25:
        sides = random.choice(("one", "both", "q", "k"))
        rotate = Rotate(
            random.choice(("half", "interleaved")),
            random.randint(1, min(case.size, case.v_size) // 2),
            random.random() < 0.2,
            "both" if sides == "one" and case.lq != case.lk else sides,
            random.random() < 0.3,
            random.random() < 0.2,
        )
    return replace(
        case,
        tables=tables,
        slopes=random.random() < 0.2,
        decay=random.choices(("", "random", "gates"), (80, 8, 12))[0],
        scale=random.choices((None, 1.0, 0.3, -0.5, "one", "H", "HL", "BHL"), (60, 8, 8, 2, 5, 6, 6, 6))[0],
        shift=random.random() < 0.12,
        rotate=rotate,
        pair=random.random() < 0.05,
    )


def _table(random: Random, case: Case) -> Table:
    near = lambda: random.choice((0, 1, 2, 3, 5, 9, 20, 60))  # noqa: E731
    kinds = ["clip", "clip", "rows", "log", "deberta", "exact"] + ["axis", "axis", "grid"] * bool(case.axes)
    if abs(case.ahead) > 1000:
        kinds.remove("exact")
    kind = random.choice(kinds)
    if kind == "clip":
        numbers: tuple[int, ...] = (near(), near())
    elif kind == "rows":
        low = random.randint(-12, 6)
        numbers = (low, low + random.randint(0, 15), random.randint(1, 9))
    elif kind == "log":
        numbers = (random.choice((4, 8, 32)), random.choice((20, 40, 128)), random.randint(0, 1))
    elif kind == "deberta":
        numbers = random.choice(((4, 12), (8, 8), (6, 50), (5, 12)))
    elif kind == "exact":
        numbers = (random.choice((-1, -1, 0, 4, 30)),)
    elif kind == "axis":
        numbers = (random.randint(1, len(case.axes)), random.randint(0, 3), random.randint(0, 3))
    else:
        numbers = tuple(random.randint(0, 2) for _ in range(2 * (1 + len(case.axes))))
    drawn = SLOTS[:-1]
    slots = tuple(slot for slot in drawn if random.random() < 0.35) or (random.choice(drawn),)
    if "states" in slots and "dot_query" not in slots:
        slots = (*slots, "dot_query")
    return Table(kind, numbers, slots, random.random() < 0.3, random.choice((1, 8, 16, 20)))


def _mask(random: Random, case: Case) -> Case:
    reach = lambda: random.choice((None, 0, 1, 3, 10, 40))  # noqa: E731
    window = (reach(), reach()) if random.random() < 0.2 else None
    return replace(
        case,
        causal=random.random() < 0.45,
        window=None if window == (None, None) else window,
        padding=random.choice(("right", "left", "holes", "empty", "shared")) if random.random() < 0.3 else "",
        documents=random.choice(("sorted", "sorted", "shuffled", "foreign")) if random.random() < 0.2 else "",
        document=random.choice((2, 6, 20, 60)),
        mask=random.choice(("bool", "added", "infinite")) if random.random() < 0.15 else "",
        mask_dims="".join(letter for letter in "BHQK" if random.random() < 0.6),
    )


def _call(random: Random, case: Case) -> Case:
    layouts = tuple(random.choice(LAYOUTS) if random.random() < 0.25 else "" for _ in range(3))
    everything = names(case)
    part = random.random()
    wanted: tuple[str, ...] | None = None
    if part < 0.15:
        wanted = ()
    elif part < 0.5:
        wanted = tuple(name for name in everything if random.random() < 0.4) or (random.choice(everything),)
    return replace(
        case,
        layouts=layouts,
        wanted=wanted,
        summed=random.random() < 0.1,
        lse=random.random() < 0.2,
        # in float16 a probability that underflows looks like a dropped one
        dropout=random.choice((0.1, 0.5)) if random.random() < 0.06 and case.dtype != "float16" else 0.0,
        blocks=random.choices((0, 1, 2, 3), (50, 20, 15, 15))[0],
        poison=random.random() < 0.1,
    )


def _query_shifts(random: Random, case: Case) -> Case:
    """Drawn last, so that a number stands for the case that it stood for before there were any."""
    wanted = case.wanted
    for number, table in enumerate(case.tables):
        if "dot_query" in table.slots and random.random() < 0.25:
            table = replace(table, slots=(*table.slots, "query_shift"))
            case = replace(case, tables=(*case.tables[:number], table, *case.tables[number + 1 :]))
            if wanted and random.random() < 0.4:
                wanted = (*wanted, f"lookups[{number}].query_shift")
    return replace(case, wanted=wanted)


def names(case: Case) -> list[str]:
    """Every tensor that can want a gradient, in the order of `tests.budget`."""
    found = ["q", "k", "v"]
    for number, table in enumerate(case.tables):
        found += [f"lookups[{number}].{slot}" for slot in SLOTS if slot in table.slots]
    found += ["scale"] * isinstance(case.scale, str) + ["slopes"] * case.slopes
    found += ["decay[0]", "decay[1]"] * bool(case.decay) + ["shift"] * case.shift
    return found + ["pair.weight"] * case.pair + ["mask"] * (case.mask in ("added", "infinite"))


def features(case: Case) -> set[str]:
    """Words that `--only` knows: names of fields that are in use, and their values."""
    plain = Case()
    found: set[str] = set()
    for field in fields(case):
        value = getattr(case, field.name)
        if value != getattr(plain, field.name):
            found.add(field.name)
            if isinstance(value, str):
                found.add(value)
    for table in case.tables:
        found |= {table.kind, *table.slots}
    found |= {"cross"} if case.lq != case.lk else set()
    found |= {"grouped"} if case.heads != case.kv_heads else set()
    found |= {layout for layout in case.layouts if layout}
    if case.rotate is not None:
        found |= {case.rotate.layout} | ({"rotated values"} if case.rotate.values else set())
    if case.batch * case.heads * case.lq * case.lk <= SMALL_PAIRS and max(case.size, case.v_size) <= 32:
        found.add("small")
    return found | {case.dtype}
