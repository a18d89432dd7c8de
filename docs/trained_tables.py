"""Train the small models whose tables the figures show: `python docs/trained_tables.py` writes src/posenc/plot/trained.json.

An untrained table draws as noise, or as nothing. These come from the lab's own model (posenc.lab.model), trained to fill in
masked bytes of the Python standard library. Attention is bidirectional, so that both signs of distance are learned:

    t5        table [buckets, heads], one for all layers
    clipped   table [heads, rows] of the first layer
    shaw      vectors [rows, head_dim] of the first layer, and the mean query of each head on held-out text: the mean
              contribution of distance r to a score is mean(q_h) · vectors[r] / sqrt(head_dim)

The file records every setting and the loss. Minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

import posenc
from posenc.lab import corpus
from posenc.lab.model import Transformer
from posenc.lab.train import answers_loss, make_optimiser, rate
from posenc.lab.trials import Training

FILE = Path(__file__).parents[1] / "src/posenc/plot/trained.json"
ENCODINGS = {"t5": "t5", "clipped": "clipped:max_distance=64", "shaw": "shaw:max_distance=64"}
MASK, VOCABULARY, HIDDEN = 256, 257, 0.15
"""The token of a masked byte, the number of tokens, and the share of masked bytes."""
LENGTH, DIGITS = 192, 4


def batch(text: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) [rows, LENGTH]: windows of the text with some bytes masked; only those are targets."""
    starts = torch.randint(len(text) - LENGTH, (rows, 1), generator=generator)
    window = text[starts + torch.arange(LENGTH)].long()
    hidden = torch.rand(window.shape, generator=generator) < HIDDEN
    return window.masked_fill(hidden, MASK), window.masked_fill(~hidden, -100)


def train(training: Training, text: corpus.Corpus) -> tuple[Transformer, float]:
    """(the trained model, its loss in nats a masked byte of the held-out text)."""
    known, held_out = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (text.train, text.held_out)
    )  # fmt: skip
    model = Transformer(
        training.encoding, vocabulary=VOCABULARY, width=training.width, heads=training.heads, layers=training.layers,
        causal=False, longest=LENGTH, seed=training.seed,
    )  # fmt: skip
    optimiser = make_optimiser(model, training)
    generator = torch.Generator().manual_seed(training.seed)
    began = time.perf_counter()
    for step in range(training.steps):
        for group in optimiser.param_groups:
            group["lr"] = training.lr * group["share"] * rate(step, training.steps)
        inputs, targets = batch(known, generator, training.batch)
        loss = answers_loss(model(inputs), targets) / (targets >= 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(
                f"{training.encoding} step {step}: {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True
            )
    inputs, targets = batch(held_out, torch.Generator().manual_seed(1), 64)
    with torch.no_grad():
        return model, float(answers_loss(model(inputs), targets) / (targets >= 0).sum())


@torch.no_grad()
def mean_query(model: Transformer, text: corpus.Corpus) -> Tensor:
    """The mean query of each head in the first layer on held-out text: [heads, head_dim]."""
    held_out = torch.frombuffer(bytearray(text.held_out), dtype=torch.uint8)
    inputs, _ = batch(held_out, torch.Generator().manual_seed(1), 64)
    block = model.blocks[0]
    x = block.norm_1(model.embedding(inputs) * model.width**0.5)
    return block.attention.q_proj(x).unflatten(-1, (block.attention.heads, -1)).mean((0, 1))


def rounded(values: Tensor) -> list:
    return [rounded(row) for row in values] if values.dim() else round(values.item(), DIGITS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = corpus.read()
    found: dict[str, dict] = {}
    for name, specification in ENCODINGS.items():
        training = Training(
            task="masked bytes", encoding=specification, seed=0, train=LENGTH, steps=given.steps, batch=16, width=128, heads=8,
            layers=2, lr=3e-3, position_lr=10.0, weight_decay=0.1, device="cpu", precision="float32", compile=False,
            engine="auto", text=text.digest,
        )  # fmt: skip
        model, loss = train(training, text)
        encoding = model.blocks[0].attention.encoding
        table = encoding.keys[0] if name == "shaw" else encoding.table
        found[name] = {"encoding": specification, "loss": round(loss, 3), "table": rounded(table.detach())}
        if name == "shaw":
            found[name]["query"] = rounded(mean_query(model, text))
        print(f"{name}: {loss:.3f} nats a masked byte", flush=True)
    shared = {
        "made_by": "python docs/trained_tables.py", "task": "fill in masked bytes (15 %), bidirectional", "text": text.source,
        "text_digest": text.digest, "length": LENGTH, "steps": training.steps, "batch": training.batch,
        "width": training.width, "heads": training.heads, "layers": training.layers, "lr": training.lr,
        "position_lr": training.position_lr, "seed": training.seed, "torch": torch.__version__,
        "posenc": posenc.__version__, "table_of": "t5: all layers; clipped and shaw: the first layer",
    }  # fmt: skip
    FILE.write_text(json.dumps({"origin": shared, "encodings": found}, separators=(",", ":")) + "\n", encoding="utf-8")
    print(FILE, FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
