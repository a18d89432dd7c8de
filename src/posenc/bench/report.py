"""Report a run: a table on the terminal, JSON, a plot."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core import files
from .growth import extra_bytes, growth, key
from .workloads import WORKLOADS


@contextmanager
def progress(keeps_lines: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, moved by tick(text, share done). keeps_lines: texts stay above it, as they do where there is no
    terminal; otherwise the last one stands beside it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console, is_terminal, began = Console(stderr=True), sys.stderr.isatty(), time.monotonic()
    text_column = TextColumn("{task.percentage:.0f} %" if keeps_lines else "{task.description}")
    columns = (BarColumn(), text_column, TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_terminal, speed_estimate_period=900) as bar:
        task = bar.add_task("starting", total=1.0)

        def tick(text: str, done: float) -> None:
            bar.update(task, description=text, completed=done)
            elapsed = "" if is_terminal else f"{time.monotonic() - began:4.0f} s {done:4.0%} "
            if keeps_lines or (elapsed and not text.startswith("checking ")):
                console.print(elapsed + text, highlight=False, markup=False, soft_wrap=True)

        yield tick


def save(result: dict, path: Path) -> None:
    files.write_json(path, {**result, "growth": growth(result)})


def load(path: Path) -> dict | None:
    """An earlier run's results; None if there are none in the current format."""
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if "ceilings" in found else None


def merged(old: dict | None, new: dict) -> dict:
    """New records replace old ones of the same machine; another machine or dtype drops all old ones."""
    if old is None or any(old.get(name) != new[name] for name in ("machine", "device", "dtype")):
        return new
    known = {key(record) for record in new["records"]}
    known |= {key({**record, "length": None}) for record in new["records"]}  # notes for every length
    kept = [record for record in old["records"] if key(record) not in known]
    order = {name: number for number, name in enumerate(dict.fromkeys([*WORKLOADS, *(r["workload"] for r in kept)]))}
    records = sorted(kept + new["records"], key=lambda r: (order[r["workload"]], r["length"] or 0, r["pass"]))
    return {**new, "versions": {**old["versions"], **new["versions"]}, "records": records}


def describe_machine(result: dict) -> str:
    machine = result["machine"]
    if "gpu" in machine:
        parts = [machine["gpu"], f"driver {machine.get('driver', 'unknown')}", f"torch {machine['torch']}"]
        return ", ".join([*parts, f"Triton {machine['triton']}", f"cuDNN {machine['cudnn']}"])
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"


def memory(record: dict, records: list[dict], base: str) -> str:
    """Extra memory in MiB, and as a share of a dense float32 [H, L, L] bias."""
    extra = extra_bytes(record, records, base)
    if extra is None or record["peer"] == base:
        return ""
    share = max(0, extra) / (record["heads"] * 4 * record["length"] ** 2)
    return f"{extra / 2**20:.0f} MiB, {share:.1%}"


def print_table(result: dict) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    records, ceilings = result["records"], result["ceilings"]
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    table = Table(title=f"{result['dtype']}, {describe_machine(result)}", box=SIMPLE)
    left = ("workload", "shape", "pass", "contender")
    headings = (*left, "time", *(f"of {name}" for name in ceilings), "±", "extra memory*")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    measured = {key(record): record for record in records if "seconds" in record}
    for record in measured.values():
        others = [measured.get(key({**record, "peer": name})) for name in ceilings[1:]]
        shares = ["" if other is None else f"{record['seconds'] / other['seconds']:.2f} ×" for other in others]
        shape = f"B{record['batch']} H{record['heads']} L{record['length']} D{record['size']}"
        table.add_row(
            record["workload"], shape, record["pass"], record["peer"], milliseconds(record["seconds"]), f"{record['ratio']:.2f} ×", *shares,
            f"{record['spread']:.2f}" if "spread" in record else "", memory(record, records, ceilings[0]),
        )  # fmt: skip
    console.print(table)
    console.print(f"* beyond {ceilings[0]}'s, and as a share of a dense float32 [H, L, L] bias")
    for line in not_timed(records):
        console.print(f"not timed: {line}", highlight=False)
    lines = growth(result)
    if lines:
        grown = Table(title="growth with the number L of tokens", box=SIMPLE)
        for heading in ("workload", "contender", "pass", "L", "time", "extra memory"):
            grown.add_column(heading)
        for power in lines:
            extra = "" if power["extra_memory"] is None else f"L^{power['extra_memory']:.2f}"
            span = f"{power['from']} … {power['to']}"
            grown.add_row(power["workload"], power["peer"], power["pass"], span, f"L^{power['time']:.2f}", extra)
        console.print(grown)
    from .run import BUSY

    disturbed = [record for record in measured.values() if record.get("busy", 0.0) > BUSY]
    if disturbed:
        worst = max(record["busy"] for record in disturbed)
        console.print(
            f"warning: other processes used up to {worst:.0%} of this machine's cores during {len(disturbed)} of "
            f"{len(measured)} measurements; run them again on a quiet machine before comparing small differences"
        )


def milliseconds(value: float) -> str:
    value *= 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.3f} ms"


def not_timed(records: list[dict]) -> list[str]:
    """One line for each reason, with the workloads and passes it applies to."""
    found: dict[tuple, list[str]] = {}
    for record in records:
        if "note" in record:
            at = "" if record["length"] is None else f" at {record['length']}"
            found.setdefault((record["peer"], record["note"]), []).append(f"{record['workload']} {record['pass']}{at}")
    return [f"{peer}, {_together(cells)}: {note}" for (peer, note), cells in found.items()]


def _together(cells: list[str]) -> str:
    both = [cell.replace(" forward", "") for cell in cells if cell.replace(" forward", " training") in cells]
    rest = [c for c in cells if c.replace(" forward", "").replace(" training", "") not in both]
    return ", ".join(dict.fromkeys(both + rest))


def plot(result: dict, path: Path) -> None:
    """For each workload, time and extra memory against length, with the fitted exponents in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [r for r in result["records"] if "seconds" in r]
    base = result["ceilings"][0]
    names = list(dict.fromkeys(r["workload"] for r in records))
    powers = {(g["workload"], g["peer"], g["pass"]): g for g in growth(result)}
    colours = {peer: f"C{number % 10}" for number, peer in enumerate(result["versions"])}
    columns = 2 if len(names) > 1 else 1
    rows = max(1, -(-len(names) // columns))
    figure, grid = plt.subplots(rows, 2 * columns, figsize=(9 * columns, 3.4 * rows), squeeze=False)
    for number, name in enumerate(names):
        pair = grid[number // columns][2 * (number % columns) : 2 * (number % columns) + 2]
        here = [r for r in records if r["workload"] == name]
        for peer in dict.fromkeys(r["peer"] for r in here):
            for kind, style in (("forward", "-"), ("training", "--")):
                found = sorted((r for r in here if (r["peer"], r["pass"]) == (peer, kind)), key=lambda r: r["length"])
                power = powers.get((name, peer, kind), {})
                times = [(r["length"], r["seconds"] * 1e3) for r in found]
                extra = [(r["length"], (extra_bytes(r, records, base) or 0) / 2**20) for r in found]
                for axis, points, what in ((pair[0], times, "time"), (pair[1], extra, "extra_memory")):
                    points = [(x, y) for x, y in points if y > 0]
                    if points:
                        label = f"{peer}, {kind}" + (f": L^{power[what]:.1f}" if power.get(what) is not None else "")
                        axis.plot(*zip(*points), style, marker="o", markersize=3, color=colours[peer], label=label)
        for axis, what in zip(pair, ("ms", f"MiB beyond {base}")):
            axis.set(title=name, xscale="log", yscale="log", xlabel="tokens", ylabel=what)
            if axis.lines:
                axis.legend(fontsize=5)
    for axis in list(grid.flat)[2 * len(names) :]:
        axis.axis("off")
    figure.suptitle(f"{result['dtype']}, {describe_machine(result)}")
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    files.write(path, drawn.getvalue())
    plt.close(figure)
