"""What a run says: a table on the terminal, JSON, a plot."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

DENSE = 8 * 4  # bytes a score of a dense float32 [H, L, L] bias


def save(result: dict, path: Path) -> None:
    """Written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    os.replace(temporary, path)


def merged(old: dict | None, new: dict) -> dict:
    """New records take the place of old ones of the same run; another machine or version starts afresh."""
    same = ("machine", "device", "dtype", "shape")
    if old is None or any(old.get(key) != new[key] for key in same):
        return new
    known = {_key(record) for record in new["records"]}
    kept = [record for record in old["records"] if _key(record) not in known]
    return {**new, "versions": {**old["versions"], **new["versions"]}, "records": kept + new["records"]}


def _key(record: dict) -> tuple:
    return record["workload"], record["peer"], record["length"], record["pass"]


def exponent(records: list[dict], workload: str, peer: str, kind: str) -> float | None:
    """p of time = c L^p, by least squares over the lengths that were measured; None with fewer than three."""
    points = [
        (math.log(r["length"]), math.log(r["seconds"]))
        for r in records
        if (r["workload"], r["peer"], r["pass"]) == (workload, peer, kind) and "seconds" in r
    ]
    if len(points) < 3:
        return None
    x, y = (sum(values) / len(points) for values in zip(*points))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def extra_share(record: dict, records: list[dict]) -> float | None:
    """Peak memory beyond plain attention's, as a share of a dense float32 [H, L, L] bias."""
    plain = next(
        (r for r in records if _key(r) == (record["workload"], "plain", record["length"], record["pass"])), None
    )
    if plain is None or "bytes" not in record or "bytes" not in plain:
        return None
    return max(0, record["bytes"] - plain["bytes"]) / (DENSE * record["length"] ** 2)


def print_table(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    records = result["records"]
    table = Table(
        title=f"{result['shape']} {result['dtype']} on {result['machine'].get('gpu', result['machine']['cpu'])}"
    )
    for heading in ("workload", "tokens", "pass", "contender", "time", "of plain", "extra memory*"):
        table.add_column(
            heading, justify="right" if heading in ("tokens", "time", "of plain", "extra memory*") else "left"
        )
    for record in records:
        if "seconds" in record:
            share = extra_share(record, records)
            table.add_row(
                record["workload"],
                str(record["length"]),
                record["pass"],
                record["peer"],
                f"{record['seconds'] * 1e3:.1f} ms",
                f"{record['ratio']:.2f} ×",
                "" if share is None else f"{share:.1%}",
            )
    console = Console()
    console.print(table)
    console.print("* beyond plain attention's, as a share of a dense float32 [H, L, L] bias")
    for workload, peer, note in dict.fromkeys((r["workload"], r["peer"], r["note"]) for r in records if "note" in r):
        console.print(f"not timed: {peer} on {workload}: {note}")
    for workload, peer, kind in dict.fromkeys((r["workload"], r["peer"], r["pass"]) for r in records):
        power = exponent(records, workload, peer, kind)
        if power is not None:
            console.print(f"{workload}, {peer}, {kind}: time grows as L^{power:.2f}")


def plot(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [r for r in result["records"] if "seconds" in r]
    names = list(dict.fromkeys(r["workload"] for r in records))
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False)
    for axis, name in zip(axes.flat, names):
        for peer in dict.fromkeys(r["peer"] for r in records if r["workload"] == name):
            for kind, style in (("forward", "-"), ("training", "--")):
                points = sorted(
                    (r["length"], r["seconds"] * 1e3)
                    for r in records
                    if (r["workload"], r["peer"], r["pass"]) == (name, peer, kind)
                )
                if points:
                    colour = f"C{list(result['versions']).index(peer)}"
                    axis.plot(*zip(*points), style, marker="o", markersize=3, color=colour, label=f"{peer}, {kind}")
        axis.set(title=name, xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        axis.legend(fontsize=5)
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    figure.suptitle(f"{result['shape']} {result['dtype']}, {result['machine'].get('gpu', result['machine']['cpu'])}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def markdown(result: dict, length: int) -> str:
    """The README's table: ratios to plain attention at one length, ours and the best peer's."""
    records = [r for r in result["records"] if r["length"] == length]
    lines = [
        "| plan | forward | training step | extra memory | best peer, forward | best peer, training |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(r["workload"] for r in records):
        own = {r["pass"]: r for r in records if r["workload"] == name and r["peer"] == "posenc" and "ratio" in r}
        if not own:
            continue
        shares = [extra_share(r, records) for r in own.values()]
        cells = [name]
        cells += [f"{own[kind]['ratio']:.2f} ×" if kind in own else "–" for kind in ("forward", "training")]
        cells.append(f"{max(s or 0.0 for s in shares):.1%}")
        for kind in ("forward", "training"):
            others = [
                r
                for r in records
                if r["workload"] == name and r["pass"] == kind and r["peer"] not in ("plain", "posenc") and "ratio" in r
            ]
            best = min(others, key=lambda r: r["ratio"], default=None)
            cells.append("–" if best is None else f"{best['ratio']:.2f} × ({best['peer']})")
        lines.append("| " + " | ".join(cells) + " |")
    machine = result["machine"]
    versions = ", ".join(
        f"{name} {version}" for name, version in result["versions"].items() if version and name != "plain"
    )
    lines += [
        "",
        f"Time relative to PyTorch's attention without any position in the same run ({result['shape']}, {length} tokens, "
        f"{result['dtype']}, {machine.get('gpu', machine['cpu'])}, {machine['threads']} threads, torch {machine['torch']}; "
        f"{versions}). Extra memory: beyond plain attention's, as a share of a dense float32 [H, L, L] bias. "
        "Every contender's results were compared with the float64 reference first.",
    ]
    return "\n".join(lines)
