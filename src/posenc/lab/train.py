"""Train one trial: the same data in the same order for every encoding, resumable, its failures recorded as results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from ..core import checks
from . import build_encoding, peak_memory, tasks, tensor_files, validate
from .corpus import Corpus
from .errors import OptionError
from .model import Transformer
from .process_group import SINGLE, ProcessGroup
from .store import Store
from .tasks import IGNORE, Batch, Task
from .trials import Training

if TYPE_CHECKING:
    from ..parallel import ContextParallel

Progress = Callable[[int, float], None]
"""Called with the step and the loss about fifty times a training."""

CHECKPOINT_SECONDS = 30.0
LONG = 5000  # steps from which a training is tested midway too,
MIDWAY = (0.2, 0.5)  # after these shares of its steps
TRIES = 4  # batches on which a compiled model is tried before training


def make_task(training: Training, corpus: Corpus | None) -> Task:
    task = tasks.create(training.task)
    if task.needs_text:
        assert corpus is not None
        device = torch.device(training.device)
        task.load(*(torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in (corpus.train, corpus.held_out)))  # type: ignore[attr-defined]  # fmt: skip
    return task


def make_model(training: Training, task: Task, context: ContextParallel | None = None) -> Transformer:
    return Transformer(
        training.encoding, vocabulary=task.vocabulary, width=training.width, heads=training.heads,
        layers=training.layers, causal=task.causal, longest=task.length(training.train), seed=training.seed,
        engine=training.engine, context=context,
    ).to(training.device)  # fmt: skip


def make_optimiser(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """Three groups: matrices decay; vectors and the encoding's own parameters do not, and the latter have their own
    rate: a bias table moves by about the rate a step, and ALiBi's biases are several units from zero."""
    own = build_encoding.position_parameters(model)
    rest = [p for p in model.parameters() if not any(p is one for one in own)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": training.weight_decay, "share": 1.0},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "share": 1.0},
        {"params": own, "weight_decay": 0.0, "share": training.position_lr},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=training.lr, betas=(0.9, 0.98), eps=1e-8, fused=training.device == "cuda"
    )


def rate(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def training_batch(
    task: Task, training: Training, step: int, group: ProcessGroup = SINGLE
) -> tuple[Batch, dict[str, Tensor]]:
    """The batch of one step, and the model's further arguments. It depends on the seed and the step only, not on the encoding or on restarts."""
    generator = torch.Generator().manual_seed((training.seed << 32) + 2 * step)
    size = training.train
    if task.varies:
        size = int(torch.randint(min(task.least, size), size + 1, (), generator=generator))
    batch = task.batch(size, training.batch, generator)
    part, options = group.part(batch)
    device = training.device
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in options.items()}
    return Batch(*(tensor.to(device, non_blocking=True) for tensor in part)), moved


def answers_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross entropies of the answers."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


Midway = Callable[[nn.Module], list[dict[str, Any]]]


def midway_steps(steps: int) -> tuple[int, ...]:
    """The steps after which long trainings are tested too, to tell whether their verdicts still move."""
    return tuple(int(steps * share) for share in MIDWAY) if steps >= LONG else ()


class Conditions(TypedDict, total=False):
    """The circumstances of a training, which do not change its result."""

    group: ProcessGroup
    progress: Progress | None
    checkpoint_seconds: float


def train(
    training: Training, store: Store, corpus: Corpus | None = None, *, group: ProcessGroup = SINGLE,
    progress: Progress | None = None, checkpoint_seconds: float = CHECKPOINT_SECONDS, evaluate_midway: Midway | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train, from a checkpoint if there is one; write the weights and return the record."""
    device = torch.device(training.device)
    task = make_task(training, corpus)
    model = make_model(training, task, group.context)
    counts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "position_parameters": sum(p.numel() for p in build_encoding.position_parameters(model)),
    }
    group.shard(model)
    optimiser = make_optimiser(model, training)
    before = time.perf_counter()
    compiled = _compile(model, task, training, group) if training.compile else "off"
    compile_seconds = time.perf_counter() - before
    start, curve, spent, midway = _resume(training, store, model, optimiser, group)
    tested = () if evaluate_midway is None or group.size > 1 else midway_steps(training.steps)
    every = max(1, training.steps // 50)
    status = "trained"
    peak_memory.reset(device)
    loss_sum, began, saved = torch.zeros((), device=device), time.perf_counter(), time.perf_counter()
    tokens, timed = 0, None
    model.train()
    for step in range(start, training.steps):
        batch, options = training_batch(task, training, step, group)
        for parameters in optimiser.param_groups:
            parameters["lr"] = training.lr * parameters["share"] * rate(step, training.steps)
        answers = group.sum((batch.targets != IGNORE).sum())
        with torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bfloat16"):
            loss = answers_loss(model(batch.inputs, **options), batch.targets) / answers
        # FSDP averages gradients over the processes, and each of them holds a part of the sum
        (loss * group.size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        tokens += batch.inputs.numel() * group.size
        if step + 1 in tested:
            assert evaluate_midway is not None
            before = time.perf_counter()
            midway.append({"step": step + 1, "points": evaluate_midway(model)})
            pause = time.perf_counter() - before  # no part of the training's time
            began, timed = began + pause, None if timed is None else timed + pause
        if (step + 1) % every and step + 1 < training.steps:
            continue
        since = (step + 1) % every or every
        value = float(group.sum(loss_sum)) / since
        loss_sum.zero_()
        curve.append([step + 1, value if math.isfinite(value) else None])
        now = time.perf_counter()
        if timed is None:  # the first interval includes compilation and warm-up
            timed, tokens = now, 0
        if progress is not None:
            progress(step + 1, value)
        if not math.isfinite(value) or value > curve[0][1] * 2 + 1:
            status = f"diverged at step {step + 1}"
            break
        if step + 1 < training.steps and group.broadcast(now - saved >= checkpoint_seconds, device):
            _checkpoint(training, store, model, optimiser, group, step + 1, curve, spent + now - began, midway)
            saved = now
    end = time.perf_counter()
    seconds = spent + end - began
    weights = {name: group.gather(p.detach()) for name, p in model.named_parameters()}
    if group.is_main:
        store.write(training.key, "weights", tensor_files.dump(weights, training.key, "weights"))
    speed = tokens / (end - timed) if timed is not None and end > timed and tokens else None
    return {
        "settings": asdict(training), "status": status, "curve": curve, "midway": midway, "seconds": seconds, "tokens_per_second": speed,
        "memory": peak_memory.peak(device), "compile": compiled, "compile_seconds": compile_seconds, "torch": torch.__version__, **counts,
    }  # fmt: skip


def _compile(model: Transformer, task: Task, training: Training, group: ProcessGroup) -> str:
    """Compile the block, whose code all layers share, and try it. A model that does not compile is trained without; the
    record says why."""
    torch.compiler.reset()  # earlier trials' code counts against the recompilation limit and is of no use here
    for block in model.blocks:
        block.compile()
    try:
        # varying sizes are compiled twice: for the first size, then for dynamic sizes
        for step in range(TRIES if task.varies else 1):
            batch, options = training_batch(task, training, step, group)
            with torch.autocast(training.device, torch.bfloat16, enabled=training.precision == "bfloat16"):
                answers_loss(model(batch.inputs, **options), batch.targets).backward()
        outcome = "compiled"
    except Exception as error:  # a compiler raises many kinds of errors; none of them ends the experiment
        for block in model.blocks:
            block._compiled_call_impl = None
        outcome = f"failed, trained without: {type(error).__name__}: {str(error)[:500]}"
    model.zero_grad(set_to_none=True)
    return outcome


def load_weights(model: nn.Module, training: Training, store: Store) -> None:
    """Load the trained weights into a model of the same settings."""
    found = tensor_files.read(store, training.key, "weights")
    if found is None or not _fits(found[0], model, ""):
        raise tensor_files.Damaged(f"{training.encoding} has no weights in this folder; run the same command again")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[0][name])


def _fits(saved: dict[str, Tensor], model: nn.Module, prefix: str) -> bool:
    """Whether there is a tensor of the right shape for every parameter."""
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    return all(shapes.get(prefix + name) == parameter.shape for name, parameter in model.named_parameters())


STEP = checks.whole(1, 10**9)
FINITE = checks.listed(validate.pair(STEP, validate.real()), least=1, most=10**5)
STATE = checks.record({"step": STEP, "curve": FINITE, "seconds": validate.real(0)}, {"midway": validate.MIDWAY})


def _checkpoint(training, store, model, optimiser, group, step, curve, seconds, midway) -> None:
    content = {}
    for name, parameter in model.named_parameters():
        content[f"weight/{name}"] = group.gather(parameter.detach())
        for part, value in optimiser.state.get(parameter, {}).items():
            content[f"{part}/{name}"] = group.gather(value)
    if group.is_main:
        state = {"step": step, "curve": curve, "seconds": seconds, "midway": midway}
        store.write(training.key, "checkpoint", tensor_files.dump(content, training.key, "checkpoint", state))


def _resume(training, store, model, optimiser, group) -> tuple[int, list, float, list]:
    """The step to continue from, the curve so far, the seconds spent and the tests midway."""
    found = _read_checkpoint(training, store, model)
    if not group.broadcast(found is not None, torch.device(training.device)):  # a damaged checkpoint counts as none
        return 0, [], 0.0, []
    assert found is not None
    saved, state = found
    for name, parameter in model.named_parameters():
        group.copy_full(parameter, saved[f"weight/{name}"])
        parts = {key.split("/")[0]: value for key, value in saved.items() if key.partition("/")[2] == name}
        held = optimiser.state[parameter]
        for part in parts.keys() - {"weight"}:
            if parts[part].shape == parameter.shape and parts[part].dim():
                held[part] = torch.zeros_like(parameter)
                group.copy_full(held[part], parts[part])
            else:
                held[part] = parts[part]
    return state["step"], state["curve"], state["seconds"], state.get("midway", [])


def _read_checkpoint(training, store, model) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """A checkpoint that this training can continue from."""
    try:
        found = tensor_files.read(store, training.key, "checkpoint")
        if found is None or not _fits(found[0], model, "weight/"):
            return None
        state = STATE("state", found[1])
    except (tensor_files.Damaged, OptionError):
        return None
    return (found[0], state) if state["step"] < training.steps else None
