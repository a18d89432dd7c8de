"""Test trained weights at the training size and far past it. A test that cannot run is a result with a reason."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

import posenc

from .corpus import Corpus
from .store import Store
from .tasks import IGNORE, Batch, Task
from .train import answers_loss, load_weights, make_model, make_task
from .trials import Testing, Trial

TOKENS = {"cpu": 16384, "cuda": 65536}  # in one forward
SEED = 1 << 40  # problems that no training uses


def evaluate(trial: Trial, testing: Testing, store: Store, corpus: Corpus | None = None) -> dict[str, Any]:
    """The record of a test: one point for every size."""
    began = time.perf_counter()
    points = _test(trial, testing, corpus, lambda model: load_weights(model, trial.training, store))
    settings = {"training": asdict(trial.training), "testing": asdict(testing)}
    return {"settings": settings, "points": points, "seconds": time.perf_counter() - began}


def evaluate_midway(trial: Trial, corpus: Corpus | None, trained: nn.Module) -> list[dict[str, Any]]:
    """The points of a model in the middle of its training, without extensions and sliding windows. The model is left alone: a
    copy is tested, which is not compiled."""
    plain = next((testing for testing in trial.tests if not testing.extension), None)
    if plain is None:
        return []

    def load(model: nn.Module) -> None:
        with torch.no_grad():
            for own, other in zip(model.parameters(), trained.parameters(), strict=True):
                own.copy_(other)

    devices = [torch.device(trial.training.device)] if trial.training.device == "cuda" else []
    with torch.random.fork_rng(devices):  # making the copy draws its first weights
        return _test(trial, replace(plain, sliding=0), corpus, load)


def _test(
    trial: Trial, testing: Testing, corpus: Corpus | None, load: Callable[[nn.Module], None]
) -> list[dict[str, Any]]:
    training = trial.training
    task = make_task(training, corpus)
    model = make_model(training, task)
    load(model)
    if testing.extension:
        model.extend(training.encoding, testing.extension, task.length(training.train))
    model.eval()
    points = []
    for size in testing.test:
        point: dict[str, Any] = {"size": size, "length": task.length(size)}
        try:
            with (
                torch.inference_mode(),
                torch.autocast(training.device, torch.bfloat16, enabled=training.precision == "bfloat16"),
            ):
                point |= _text(model, task, size, testing) if task.needs_text else _problems(model, task, size, testing)
        except (ValueError, posenc.UnsupportedPlan) as error:
            point["error"] = str(error)
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            point["error"] = f"out of memory at length {point['length']}"
        points.append(point)
    return points


def _problems(model, task: Task, size: int, testing: Testing) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED + size)
    batch = task.batch(size, testing.count, generator)
    device = next(model.parameters()).device
    loss, right, answers, exact = 0.0, 0, 0, 0
    for part in _parts(batch, device):
        inputs, targets = part.inputs.to(device), part.targets.to(device)
        logits = model(inputs)
        counted = targets != IGNORE
        hit = (logits.argmax(-1) == targets) | ~counted
        loss += float(answers_loss(logits, targets))
        right += int((hit & counted).sum())
        answers += int(counted.sum())
        exact += int(hit.all(dim=1).sum())
    return _finite({"loss": loss / answers, "accuracy": right / answers, "exact": exact / testing.count})


def _text(model, task, size: int, testing: Testing) -> dict[str, Any]:
    batch = task.windows(size, testing.count)
    point = {"loss": _mean_loss(model, batch, batch.targets.shape[1])}
    if testing.sliding:
        first = max(testing.test) - testing.sliding
        batch = task.sliding(size, testing.sliding, testing.windows, first)
        point["sliding"] = _mean_loss(model, batch, testing.sliding)
    return _finite(point)


def _mean_loss(model, batch: Batch, counted: int) -> float:
    """The mean over the last `counted` positions of every row."""
    total = 0.0
    for part in _parts(batch, batch.inputs.device):
        logits = model(part.inputs)[:, -counted:]
        total += float(answers_loss(logits, part.targets[:, -counted:]))
    return total / (batch.targets.shape[0] * counted)


def _parts(batch: Batch, device: torch.device) -> list[Batch]:
    rows = max(1, TOKENS[device.type] // batch.inputs.shape[1])
    return [Batch(*pair) for pair in zip(batch.inputs.split(rows), batch.targets.split(rows))]


def _finite(point: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a loss that is not a number becomes an error."""
    if all(math.isfinite(value) for value in point.values()):
        return point
    return {"error": "the loss is not a number"}
