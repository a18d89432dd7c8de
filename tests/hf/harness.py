"""One harness for every family of posenc.hf. A family's test file lists its models as cases and has one test:

CASES = {"t5": Case(make, batch, layers=6, way="interface, compute_bias replaced", generates=True)}

@pytest.mark.parametrize(("case", "check"), pairs(CASES))
def test_family(case, check):
    run_check(CASES[case], check)
"""

import copy
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from posenc import hf
from posenc.hf.family import first
from tests.hf.compare import gradients_agree, outputs_agree, shape_of
from tests.seeds import generator, seed

PADDINGS = ("none", "left", "right", "holes")


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    """A random model with scores that matter (`scatter`), the same at every call."""
    batch: Callable[[], dict[str, Any]]
    """The inputs of a call, three rows; the harness adds `attention_mask` [3, L], after the first tensor's first two sizes."""
    layers: int
    """Attention layers that run on posenc."""
    way: str
    """What `report` says of the layers with positional terms: a prefix of one of their ways."""
    paddings: tuple[str, ...] = PADDINGS
    """Kinds of padding that the family takes; ("none",): it takes no attention_mask."""
    generates: dict[str, dict] | None = None
    """Options of `generate`, by name, of the model that `with_head` makes."""
    with_head: Callable[[], nn.Module] | None = None
    checkpoints: tuple[bool, ...] = (False, True)
    """gradient_checkpointing_enable with use_reentrant as given; (): the original has none."""
    compiles: bool | str = True
    """Whether one graph can hold it; "quick": its test is not a slow one."""
    pickles: bool = True
    """Whether torch.save takes the original."""
    skips: dict[str, str] = field(default_factory=dict)
    """Check -> why it does not apply; by default none."""


def scatter(model: nn.Module, std: float = 0.2) -> nn.Module:
    """Weights large enough for scores that matter."""
    torch.manual_seed(seed(7))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
    return model.eval()


def inputs_of(case: Case, padding: str) -> dict[str, Any]:
    torch.manual_seed(seed(2))
    inputs = case.batch()
    if case.paddings != ("none",):
        inputs["attention_mask"] = mask_of(next(iter(inputs.values())), padding)
    return inputs


def mask_of(tokens: torch.Tensor, padding: str) -> torch.Tensor:
    rows, length = tokens.shape[:2]
    mask = torch.ones(rows, length, dtype=torch.long)
    if padding == "left":
        mask[1, : length // 3] = 0
        mask[2, : length // 5] = 0
    elif padding == "right":
        mask[1, length - length // 3 :] = 0
        mask[2, length - length // 5 :] = 0
    elif padding == "mixed":
        mask[1, length - length // 3 :] = 0
        mask[2, : length // 4] = 0
    elif padding == "holes":
        mask[0, length // 4 : length // 2] = 0
        mask[1, -3:] = 0
        mask[2, 1::3] = 0
    return mask


def real_output(model, inputs):
    """The first output, at real tokens: what stands at padding is nobody's output."""
    found = first(model(**inputs))
    mask = inputs.get("attention_mask")
    return found[mask.bool()] if mask is not None and found.shape[:2] == mask.shape else found


def outcome(model, inputs):
    model.zero_grad()
    found = real_output(model, inputs)
    (found * torch.randn(found.shape, generator=generator(5)).to(found)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found.detach(), gradients


def check_padding(case: Case, padding: str) -> None:
    """Outputs to 1e-5 and gradients to 1e-4 of the original's, state_dict and tensors the same."""
    model, inputs = case.make(), inputs_of(case, padding)
    theirs, their_gradients = outcome(model, inputs)
    pointers = {name: x.data_ptr() for name, x in model.state_dict().items()}
    assert hf.accelerate(model) is model
    ours, our_gradients = outcome(model, inputs)
    outputs_agree(ours, theirs)
    gradients_agree(our_gradients, their_gradients)
    assert {name: x.data_ptr() for name, x in model.state_dict().items()} == pointers


def check_restore(case: Case) -> None:
    """Undone without a trace; a deep copy and a pickled model are models of their own."""
    model, inputs = case.make(), inputs_of(case, case.paddings[-1])
    before, keys = shape_of(model), list(model.state_dict())
    with torch.no_grad():
        theirs = real_output(model, inputs)
        ours = real_output(hf.accelerate(model), inputs)
        copies = [copy.deepcopy(model)]
        if case.pickles:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copies.append(torch.load(file, weights_only=False))
        for parameter in model.parameters():
            parameter.add_(0.1)  # a copy that still used these weights would notice
        for one in copies:
            assert list(one.state_dict()) == keys
            assert len(hf.report(one).layers) == case.layers
            assert torch.equal(real_output(one, inputs), ours)
            outputs_agree(real_output(hf.restore(one), inputs), theirs)
            assert hf.report(one).layers == []
    assert hf.restore(model) is model
    assert shape_of(model) == before
    assert list(model.state_dict()) == keys
    assert hf.report(model).layers == []


def check_way(case: Case) -> None:
    layers = hf.report(hf.accelerate(case.make()), length=64).layers
    assert len(layers) == case.layers, hf.report(hf.accelerate(case.make()))
    assert any(one.way.startswith(case.way) for one in layers), {one.way for one in layers}


def check_cache(case: Case, device: str = "cpu") -> None:
    """`generate` from left-padded prompts gives the same tokens."""
    assert case.generates is not None
    inputs = inputs_of(case, "left" if "left" in case.paddings else "none")
    inputs = {name: x.to(device) for name, x in inputs.items() if not name.startswith("decoder")}
    for options in case.generates.values():
        model = (case.with_head or case.make)().to(device)
        options = dict(max_new_tokens=8, do_sample=False, **options)
        if device != "cpu":
            options["disable_compile"] = True  # static caches: generate would compile
        theirs = model.generate(**inputs, **options)
        assert theirs.shape[1] > 4
        assert torch.equal(hf.accelerate(model).generate(**inputs, **options), theirs)


def check_compile(case: Case) -> None:
    model, inputs = case.make(), inputs_of(case, case.paddings[-1])
    with torch.no_grad():
        theirs = real_output(model, inputs)
        torch._dynamo.reset()
        compiled = torch.compile(hf.accelerate(model), backend="eager", fullgraph=True)
        outputs_agree(real_output(compiled, inputs), theirs)


def check_checkpointing(case: Case, reentrant: bool) -> None:
    """Against the accelerated model without it: dropout is on, as in training."""
    model, inputs = hf.accelerate(case.make()).train(), inputs_of(case, case.paddings[-1])
    torch.manual_seed(seed(3))
    _, wanted = outcome(model, inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    torch.manual_seed(seed(3))
    gradients_agree(outcome(model, inputs)[1], wanted)


@contextmanager
def impatient():
    """Threads that switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_threads(case: Case) -> None:
    """Two requests with different padding (or other values) at once."""
    model = hf.accelerate(case.make())
    calls = [inputs_of(case, case.paddings[-1]), inputs_of(case, case.paddings[0])]
    if len(case.paddings) == 1:
        name, tensor = next(iter(calls[1].items()))
        calls[1][name] = tensor.flip(0)

    def many(given):
        torch.set_num_threads(1)
        with torch.no_grad():
            return [real_output(model, given) for _ in range(6)]

    alone = [many(given)[0] for given in calls]
    with impatient(), ThreadPoolExecutor(2) as threads:
        for found, wanted in zip(threads.map(many, calls), alone, strict=True):
            for one in found:
                assert torch.equal(one, wanted)
    assert alone[0].shape != alone[1].shape or not torch.equal(*alone)


def checks_of(case: Case) -> dict[str, Callable[[], None]]:
    """Check -> what runs it."""
    checks: dict[str, Callable[[], None]] = {
        f"padding {one}": lambda one=one: check_padding(case, one) for one in case.paddings
    }
    checks |= {name: lambda f=f: f(case) for name, f in (("restore", check_restore), ("way", check_way))}
    checks["threads"] = lambda: check_threads(case)
    if case.generates is not None:
        checks["cache"] = lambda: check_cache(case)
    if case.compiles:
        checks["compile"] = lambda: check_compile(case)
    for reentrant in case.checkpoints:
        checks[f"checkpointing {'re' if reentrant else 'non-re'}entrant"] = lambda r=reentrant: check_checkpointing(
            case, r
        )
    return {name: check for name, check in checks.items() if name not in case.skips}


def pairs(cases: dict[str, Case]) -> list:
    return [
        pytest.param(
            name, check, id=f"{name}-{check}",
            marks=[pytest.mark.slow] if check == "compile" and case.compiles != "quick" else [],
        )
        for name, case in cases.items()
        for check in checks_of(case)
    ]  # fmt: skip


def run_check(case: Case, check: str) -> None:
    checks_of(case)[check]()
