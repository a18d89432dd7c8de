"""The READMEs' tables: ratios to attention without positions, ours and the best peer's."""

from __future__ import annotations

from .growth import extra_bytes
from .report import where_run


def markdown(result: dict, length: int, words: dict[str, str] | None = None) -> str:
    """One table at one length. `words` translates headings and the legend."""
    say = (words or {}).get
    records = [r for r in result["records"] if r["length"] == length]
    base = result["ceilings"][0]
    headings = ["plan", "forward", "training step", "extra memory", "best peer, forward", "best peer, training"]
    headings = [say(heading, heading) for heading in headings]
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for name in dict.fromkeys(r["workload"] for r in records):
        own = {r["pass"]: r for r in records if r["workload"] == name and r["peer"] == "posenc" and "ratio" in r}
        if not own:
            continue
        extra = max((extra_bytes(r, records, base) or 0, r) for r in own.values() if "bytes" in r)[0]
        some = next(iter(own.values()))
        cells = [name, *(f"{own[kind]['ratio']:.2f} ×" if kind in own else "–" for kind in ("forward", "training"))]
        cells.append(f"{max(0, extra) / 2**20:.0f} MiB ({max(0, extra) / (some['heads'] * 4 * length**2):.1%})")
        cells += [_best(records, name, kind, result["ceilings"]) for kind in ("forward", "training")]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(
        f"{name} {version}"
        for name, version in result["versions"].items()
        if version and name not in (*result["ceilings"], "dense bias", "textbook", "flex attention")
    )
    shape = next(r for r in records if "seconds" in r)
    legend = say(
        "legend",
        "Time relative to {base} without any position, with which each contender took turns (B{batch} H{heads} D{size}, {length} tokens, {dtype}, "
        "{machine}; {versions}). Extra memory: beyond the same, and as a share of a dense float32 [H, L, L] bias. "
        "Every contender's results were compared with the float64 reference first.",
    )
    ceiling = {"plain": "`scaled_dot_product_attention`", "flash attention": "PyTorch's FlashAttention"}[base]
    legend = legend.format(
        base=ceiling, batch=shape["batch"], heads=shape["heads"], size=shape["size"], length=length,
        dtype=result["dtype"], machine=where_run(result), versions=versions,
    )  # fmt: skip
    return "\n".join([*lines, "", legend])


def _best(records: list[dict], name: str, kind: str, ceilings: list[str]) -> str:
    others = [
        r
        for r in records
        if r["workload"] == name and r["pass"] == kind and r["peer"] not in (*ceilings, "posenc") and "ratio" in r
    ]
    best = min(others, key=lambda r: r["ratio"], default=None)
    return "–" if best is None else f"{best['ratio']:.2f} × ({best['peer']})"
