"""How fast the lab's model trains with each encoding, next to the same model without positions.

Each round runs one step of every model, starting with another one, so that a disturbance affects all alike; the ratio is
that of the medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import posenc

from ..bench.peers import textbook_shaw
from .errors import LabError
from .model import Transformer
from .train import answers_loss

ENCODINGS = ("none", "sinusoidal", "learned", "shaw", "clipped", "t5", "alibi", "rope")
TEXTBOOK = "shaw (textbook)"
GOAL = 0.8


class Speed(NamedTuple):
    encoding: str
    seconds: float  # a step, median
    tokens: float  # a second
    ratio: float  # to `none`


class TextbookShaw(nn.Module):
    """Shaw as tutorials write it, with the vectors of all pairs, [L, L, d], in memory. A baseline for speed that shares
    the tables of posenc's encoding."""

    def __init__(self, ours: posenc.Attention):
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        ours = self.ours
        projections = ours.q_proj, ours.k_proj, ours.v_proj
        q, k, v = (p(x).unflatten(-1, (ours.heads, ours.head_dim)).transpose(1, 2) for p in projections)
        out = textbook_shaw(q, k, v, ours.encoding, scale=ours.head_dim**-0.5, causal=True)
        return ours.o_proj(out.transpose(1, 2).flatten(2))


def measure(
    encodings: Sequence[str] | None = None, *, length: int = 512, batch: int = 4, width: int = 128, heads: int = 4,
    layers: int = 3, rounds: int = 7, device: str = "cpu",
) -> list[Speed]:  # fmt: skip
    """Training steps (forward, backward, optimiser) at one length."""
    names = list(dict.fromkeys(("none", *(encodings or ENCODINGS))))
    if any("+" in name for name in names):
        raise LabError("--throughput measures training, and extensions apply to tests only; leave them out")
    sizes = {"vocabulary": 257, "width": width, "heads": heads, "layers": layers, "causal": True, "longest": length}
    models = {name: Transformer(name, **sizes).to(device) for name in names}  # type: ignore[arg-type]
    if "shaw" in models:
        textbook = Transformer("shaw", engine="reference", **sizes)  # type: ignore[arg-type]
        for block in textbook.blocks:
            block.attention = TextbookShaw(block.attention)  # type: ignore[arg-type]
        models[TEXTBOOK] = textbook.to(device)
    tokens = torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    if TEXTBOOK in models:
        _check(models["shaw"], models[TEXTBOOK], tokens[:, :-1])
    optimisers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        first = number % len(models)
        for name in [*models][first:] + [*models][:first]:
            seconds = _step(models[name], optimisers[name], tokens, device)
            if number:  # the first round warms up
                times[name].append(seconds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return [Speed(name, s, batch * length / s, middle["none"] / s) for name, s in middle.items()]


def _step(model: nn.Module, optimiser: torch.optim.Optimizer, tokens: Tensor, device: str) -> float:
    began = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = answers_loss(model(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _check(ours: nn.Module, textbook: nn.Module, inputs: Tensor) -> None:
    """No speed is reported on a wrong result."""
    with torch.no_grad():
        a, b = ours(inputs[:1, :96]), textbook(inputs[:1, :96])
    if not torch.allclose(a, b, atol=1e-3, rtol=1e-3):
        apart = float((a - b).abs().max())
        raise LabError(f"posenc's Shaw and the textbook's differ by {apart:.2g}: no speed is reported")


def as_text(speeds: list[Speed]) -> str:
    wide = max(len(speed.encoding) for speed in speeds)
    lines = [f"{'encoding':<{wide}}  ms a step  tokens/s  × none"]
    for speed in speeds:
        mark = "" if speed.ratio >= GOAL or speed.encoding == TEXTBOOK else f"  below {GOAL}"
        numbers = f"{1000 * speed.seconds:9.1f}  {speed.tokens:8.0f}  {speed.ratio:6.2f}"
        lines.append(f"{speed.encoding:<{wide}}  {numbers}{mark}")
    return "\n".join(lines)
