"""A failing case made as simple as it can be while it fails: features go one by one, then sizes are halved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from tests.fuzz.case import Case, Table, names

Any = TypeVar("Any")
MOST_STEPS = 400


def shrink(case: Any, fails: Callable[[Any], bool], simpler: Callable[[Any], Iterator[Any]]) -> Any:
    """The case after every simplification under which it still fails."""
    steps, going = 0, True
    while going and steps < MOST_STEPS:
        going = False
        for candidate in simpler(case):
            steps += 1
            if candidate != case and fails(candidate):
                case, going = candidate, True
                break
            if steps >= MOST_STEPS:
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Candidates, those that take most away first."""
    plain = Case()
    for number in range(len(case.tables)):
        yield _valid(replace(case, tables=case.tables[:number] + case.tables[number + 1 :]))
    for field in fields(case):
        if field.name in (*SIZES, *OTHERS) or getattr(case, field.name) == getattr(plain, field.name):
            continue
        yield _valid(replace(case, **{field.name: getattr(plain, field.name)}))
    for dtype in ("float64", "float32"):
        yield replace(case, dtype=dtype, table_dtype=dtype)
        if case.dtype == dtype:
            break
    for number, table in enumerate(case.tables):
        for other in _simpler_table(table):
            yield _valid(replace(case, tables=case.tables[:number] + (other,) + case.tables[number + 1 :]))
    if case.rotate is not None:
        yield from (replace(case, rotate=other) for other in simpler_fields(case.rotate))
    if case.wanted != ():
        yield replace(case, wanted=())
    for name in names(case) if case.wanted is None else case.wanted if len(case.wanted) > 1 else ():
        yield replace(case, wanted=(name,))
    if case.data:
        yield replace(case, data=0)
    for number in range(3):
        yield replace(case, layouts=(*case.layouts[:number], "", *case.layouts[number + 1 :]))
    if case.window is not None:
        yield replace(case, window=(None, case.window[1]))
        yield replace(case, window=(case.window[0], None))
    for name in SIZES:
        value, least = getattr(case, name), 1
        for smaller in dict.fromkeys((least, value // 2, value * 3 // 4, value - 1)):
            if least <= smaller < value:
                yield _valid(replace(case, **{name: smaller}))
    if case.lq > 1 and case.lk > 1:
        yield _valid(replace(case, lq=case.lq // 2, lk=case.lk // 2))
        yield _valid(replace(case, lq=case.lq - 1, lk=case.lk - 1))


BESIDE = ("states", "query_shift")
"""Slots that go with dot_query."""
OTHERS = ("tables", "dtype", "table_dtype", "wanted", "data")
SIZES = ("batch", "heads", "kv_heads", "lq", "lk", "size", "v_size")


def simpler_fields(value: Any) -> Iterator[Any]:
    """A dataclass with one field after another at its default."""
    assert is_dataclass(value)
    plain = type(value)()
    for field in fields(value):
        if getattr(value, field.name) != getattr(plain, field.name):
            yield replace(value, **{field.name: getattr(plain, field.name)})


def _simpler_table(table: Table) -> Iterator[Table]:
    if table.kind != "clip":
        yield replace(table, kind="clip", numbers=(2, 2))
    if table.kind == "clip" and table.numbers != (2, 2):
        yield replace(table, numbers=(2, 2))
    for slot in table.slots:
        rest = tuple(x for x in table.slots if x != slot and not (slot == "dot_query" and x in BESIDE))
        if rest:
            yield replace(table, slots=rest)
    if table.shared:
        yield replace(table, shared=False)
    if "states" in table.slots and table.width > 1:
        yield replace(table, width=1)


def _valid(case: Case) -> Case:
    """The case with what no longer fits put right."""
    changes: dict = {}
    if case.heads % case.kv_heads:
        changes["kv_heads"] = 1
    if case.rotate is not None:
        most = min(case.size, case.v_size) // 2
        sides = "both" if case.rotate.sides == "one" and case.lq != case.lk else case.rotate.sides
        rotate = replace(case.rotate, pairs=min(case.rotate.pairs, most), sides=sides)
        changes["rotate"] = rotate if most else None
    axes = len(case.axes)
    changes["tables"] = tuple(
        table
        for table in case.tables
        if not (table.kind == "axis" and table.numbers[0] > axes)
        and not (table.kind == "grid" and len(table.numbers) > 2 * (axes + 1))
        and not (table.kind == "exact" and abs(case.ahead) > 1000)
    )
    case = replace(case, **changes)
    if case.wanted is not None:
        case = replace(case, wanted=tuple(name for name in case.wanted if name in names(case)))
    return case
