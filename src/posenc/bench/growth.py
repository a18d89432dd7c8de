"""How time and extra memory grow with the length: c L^p, fitted by least squares on logarithms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """p of y = c L^p over (length, y > 0); None with fewer than three lengths."""
    logs = [(math.log(length), math.log(value)) for length, value in points if value > 0]
    return statistics.linear_regression(*zip(*logs)).slope if len(logs) > 2 else None


def extra_bytes(record: dict, records: list[dict], base: str) -> int | None:
    """Peak memory beyond that of attention without positions, same workload, length and pass."""
    wanted = key({**record, "peer": base})
    other = next((one for one in records if key(one) == wanted), {})
    return record["bytes"] - other["bytes"] if "bytes" in record and "bytes" in other else None


def key(record: dict) -> tuple:
    return record["workload"], record["peer"], record["length"], record["pass"]


def growth(result: dict) -> list[dict]:
    """One line for each workload, contender and pass that was measured at three lengths or more of one batch size."""
    base = result["ceilings"][0]
    groups: dict[tuple, list[dict]] = {}
    for record in result["records"]:
        if "seconds" in record:
            groups.setdefault((record["workload"], record["peer"], record["pass"], record["batch"]), []).append(record)
    lines = []
    for (workload, peer, kind, _), records in groups.items():
        time = exponent([(r["length"], r["seconds"]) for r in records])
        if time is None:
            continue
        extra = [(r["length"], extra_bytes(r, result["records"], base) or 0) for r in records]
        lengths = sorted(r["length"] for r in records)
        line = {"workload": workload, "peer": peer, "pass": kind, "from": lengths[0], "to": lengths[-1]}
        more = None if peer == base else exponent(extra)
        lines.append({**line, "time": round(time, 2), "extra_memory": None if more is None else round(more, 2)})
    return lines
