"""Every scheme on a task that only order can solve: at each place, say which token stood three places before.

One attention layer per scheme, everything else equal: same data, same seed, same steps. The first column is the
accuracy at the training length, the second at four times that length, where no scheme was trained.
Prints a table and writes OUT/demo.svg. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import posenc
from posenc import terminal

BACK, VOCABULARY, LENGTH, FAR = 3, 16, 32, 128
D_MODEL, HEADS, STEPS, BATCH = 64, 4, 250, 32
OPTIONS = {
    "learned": {"max_len": LENGTH},
    "t5": {"causal": True},
    "transformer_xl": {"causal": True},
    "xlnet": {"attn_type": "uni"},
}


class Model(nn.Module):
    """Embedding, one causal attention layer, a linear answer."""

    def __init__(self, name: str):
        super().__init__()
        scheme = posenc.create(name, d_model=D_MODEL, heads=HEADS, **OPTIONS.get(name, {}))
        self.embedding = nn.Embedding(VOCABULARY, D_MODEL)
        self.attention = posenc.Attention(D_MODEL, HEADS, position=scheme, causal=True)
        self.answer = nn.Linear(D_MODEL, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.answer(self.attention(self.embedding(tokens)))


def batch(length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, length), generator=generator)


def train(name: str) -> Model:
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    model = Model(name)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=STEPS)
    for _ in range(STEPS):
        tokens = batch(LENGTH, data)
        logits = model(tokens)[:, BACK:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-BACK].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: Model, length: int) -> float | str:
    """The share of right answers, or why there is none."""
    tokens = batch(length, torch.Generator().manual_seed(2))
    try:
        logits = model(tokens)
    except ValueError as refused:
        return str(refused).split(";")[0].split(", but")[0]
    return (logits[:, BACK:].argmax(-1) == tokens[:, :-BACK]).float().mean().item()


def picture(results: dict[str, tuple[float | str, float | str]]) -> str:
    """Two bars a scheme, as an SVG."""
    row, left, wide = 34, 150, 480
    parts = []
    for number, (name, pair) in enumerate(results.items()):
        top = 64 + number * row
        parts.append(f'<text x="{left - 10}" y="{top + 17}" text-anchor="end">{name}</text>')
        for which, (value, fill) in enumerate(zip(pair, ("#0072b2", "#e69f00"))):
            y = top + 2 + 12 * which
            if isinstance(value, str):
                parts.append(f'<text x="{left + 4}" y="{y + 10}" font-size="11">{value}</text>')
            else:
                parts.append(
                    f'<rect x="{left}" y="{y}" width="{max(1.0, value * wide):.1f}" height="11" fill="{fill}"/>'
                )
    height = 64 + row * len(results) + 20
    title = f"Which token stood {BACK} places before? Share of right answers, chance is {1 / VOCABULARY:.0%}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 30}" height="{height}" '
        f'font-family="sans-serif" font-size="14"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="24">{title}</text>'
        f'<text x="{left}" y="48" fill="#0072b2">length {LENGTH} (trained)</text>'
        f'<text x="{left + 170}" y="48" fill="#b37400">length {FAR}</text>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the picture (out/demo)")
    parser.add_argument("--schemes", nargs="+", default=posenc.names(), help="some schemes only")
    given = parser.parse_args()
    terminal.prepare()
    torch.set_num_threads(1)  # the tensors are small: a second thread costs more than it brings
    results, rows = {}, []
    start = time.perf_counter()
    for name in given.schemes:
        began = time.perf_counter()
        model = train(name)
        results[name] = pair = (accuracy(model, LENGTH), accuracy(model, FAR))
        cells = [value if isinstance(value, str) else f"{value:.0%}" for value in pair]
        rows.append((name, *cells, f"{sum(p.numel() for p in model.attention.position.parameters()):,}"))
        print(f"{name:16} {cells[0]:>5} at {LENGTH}   {time.perf_counter() - began:4.1f} s", flush=True)
    print(f"\nWhich token stood {BACK} places before? One layer, {STEPS} steps, chance is {1 / VOCABULARY:.0%}.\n")
    print("\n".join(terminal.table(("scheme", f"length {LENGTH} (trained)", f"length {FAR}", "parameters"), rows)))
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "demo.svg"
    unfinished = path.with_suffix(".svg.part")
    unfinished.write_text(picture(results), encoding="utf-8")
    os.replace(unfinished, path)
    print(f"\n{time.perf_counter() - start:.0f} s; the picture is {path}")


if __name__ == "__main__":
    main()
