"""The cells of a device in the order in which they run, and `posenc bench --suite uses`."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ..core import files
from . import report, uses, uses_calls, uses_layers, uses_models
from .measure import machine, release

LIMITS = {"cpu": None, "cuda": 450.0}
"""Seconds after which no cell starts, unless --seconds says otherwise."""
BUDGETS = {"cpu": 0.4, "cuda": 0.3}
"""Seconds of timing for a cell."""


def all_cells(device: str) -> list[uses.Cell]:
    cells = [*uses_layers.cells(device), *uses_layers.masked_cells(device), *uses_models.cells(device)]
    if device == "cpu":
        return cells
    return sorted([*uses_calls.cells(device), *uses_models.compiled_cells(device), *cells], key=_turn)


TURNS = ("host/", "model/", "compiled/t5, 2 layers/64x128", "compiled/deberta, 2 layers/64x128", "decode/", "generate/", "call/", "windows/",
         "layer/", "masked/", "lengths/", "compiled/")  # fmt: skip
"""On a GPU, whose time may run out: what matters most comes first."""


def _turn(cell: uses.Cell) -> int:
    return next(number for number, start in enumerate(TURNS) if cell.name.startswith(start))


# ---- kernels compiled ahead ------------------------------------------------------------------------------------------
def warm_in_processes(cells: list[uses.Cell], device: str, processes: int) -> None:
    """Compile what the cells need, side by side, so that the run itself finds it in the caches on disk."""
    names = [cell.name for cell in cells if not cell.name.startswith("lengths/")]  # which begins with an empty cache
    started = [
        subprocess.Popen([sys.executable, "-m", "posenc.bench.uses_suite", device, *share])
        for share in share_out(names, processes)
    ]
    for process in started:
        process.wait()


def share_out(names: list[str], processes: int) -> list[list[str]]:
    """Cells of one encoding, which share kernels, stay together; compiled models, which take longest, are shared out first."""
    together: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: not name.startswith("compiled/")):
        together.setdefault(name if name.startswith("compiled/") else name.split("/")[1], []).append(name)
    shares: list[list[str]] = [[] for _ in range(min(processes, len(together)))]
    for number, group in enumerate(together.values()):
        shares[number % len(shares)] += group
    return shares


def warm(device: str, names: list[str]) -> None:
    chosen = {cell.name: cell for cell in all_cells(device)}
    for name in names:
        began, what = time.monotonic(), "warm"
        try:
            uses.warm(chosen[name])
        except Exception as error:  # the run will say so
            what = type(error).__name__
        print(f"{name}: {what}, {time.monotonic() - began:.1f} s", flush=True)
        release(device)


def versions() -> dict[str, str]:
    found = {}
    for name in ("transformers", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(
    device: str, path: Path, *, only: list[str] | None, missing: bool, limit: float | None, listed: bool,
    part: str | None = None, merged: list[str] | None = None, processes: int = 0,
) -> int:  # fmt: skip
    try:
        if merged:
            result = uses.merge([uses.load(Path(name)) for name in merged])
            files.write_json(path, result)
            print(uses.summary(result))
            print(f"wrote {path}")
            return 0
        cells = uses.take_part(uses.select(all_cells(device), only), part)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if listed:
        print("\n".join(cell.name for cell in cells))
        return 0
    if not cells:
        print(f"no cell matches {' '.join(only or [])}; --list names them", file=sys.stderr)
        return 2
    if processes:
        warm_in_processes(cells, device, processes)
    described: dict[str, Any] = {**machine(device), **versions()}
    with report.progress(keeps_lines=True) as show:
        result = uses.run(
            cells, device, path, machine=described, limit=LIMITS[device] if limit is None else limit,
            budget=BUDGETS[device], missing=missing, show=show,
        )  # fmt: skip
    print(uses.summary(result))
    print(f"wrote {path}")
    return 1 if any("failed" in record for record in result["cells"].values()) else 0


if __name__ == "__main__":
    warm(sys.argv[1], sys.argv[2:])
