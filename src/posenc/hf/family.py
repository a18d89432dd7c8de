"""What a family of models gives to `accelerate`: one file here for each, which is imported when a model needs it.

    FAMILY = Family(tiny, layers=(T5Attention, ...))

Two ways:

interface   the layer calls transformers' attention interface. Its class stays; `InterfaceLayer` says how its `position_bias`
            becomes a plan, and which methods of the instance are replaced because they would build a dense bias.
override    the layer calls no interface. Its class becomes a subclass (`Layer`, layer.py), whose file gives the reason and the
            lines of transformers that it stands for.

What a family relies on is checked, not the version: names and arguments (`relies_on`), and numbers, on the tiny model, when a
process first needs the family.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .. import Plan, Positions
from ..core.precision import no_autocast
from .layer import Replacement, Sample

FOLDERS = {
    "t5": "t5", "mt5": "t5", "umt5": "t5", "longt5": "longt5",
    "mpnet": "mpnet", "deberta": "deberta", "deberta_v2": "deberta", "xlnet": "xlnet",
    "wav2vec2_conformer": "conformer", "wav2vec2_bert": "conformer",
    "seamless_m4t": "conformer", "seamless_m4t_v2": "conformer",
    "bloom": "alibi", "mpt": "alibi", "inkling": "inkling", "inkling2": "inkling", "wavlm": "wavlm",
    "speecht5": "shaw", "vits": "shaw", "sew_d": "sew_d", "falcon": "falcon", "gptj": "gptj", "codegen": "gptj", "cpmant": "cpmant",
    "fastspeech2_conformer": "relative_speech", "parakeet": "relative_speech",
    "nemotron_asr_streaming": "relative_speech", "beit": "beit", "data2vec": "beit",
    **dict.fromkeys(("layoutlmv2", "layoutlmv3", "pp_doclayout_v2"), "layout"),
    **dict.fromkeys(("switch_transformers", "pop2piano", "pix2struct", "udop"), "t5_like"),
    **dict.fromkeys(("swin", "donut", "maskformer", "clap", "swinv2", "swin2sr"), "swin"),
    **dict.fromkeys(
        ("sam", "sam_hq", "got_ocr2", "pp_formulanet", "slanext", "unlimited_ocr", "deepseek_ocr2", "seggpt", "vitdet"),
        "decomposed",
    ),
}  # fmt: skip
"""Folder of transformers.models -> the module here that knows its attention."""
READ_TABLES = frozenset(
    ("conformer", "deberta", "inkling", "layout", "longt5", "mpnet", "sew_d", "shaw", "swin", "t5", "t5_like", "wavlm")
)
"""Modules here that read weights of a layer's children without calling them, so that hooks which load weights do not run."""

INTERFACE, OVERRIDE = "interface", "override"


class InterfacePart(Replacement):
    """A module whose class stays. It is a namespace: nothing makes an instance of it."""

    attributes: tuple[str, ...] = ()
    """Attributes that every instance must have."""
    replaces: Mapping[str, Callable] = {}
    """Method of the instance ("forward", or "child.forward") -> function(module, original method, *args, **kwargs), which
    runs while attn_implementation is "posenc"."""
    hook: Callable | None = None
    """A forward pre-hook (module, args, kwargs) -> (args, kwargs)."""

    @staticmethod
    def needs_hook(module: Any) -> bool:
        """Whether this module gets the hook: a module with one takes longer to call."""
        return True

    @staticmethod
    def prepare(module: Any) -> dict[str, Any]:
        """What is the same for every call, as attributes of the module: names begin with posenc_. ValueError: refused."""
        return {}


class InterfaceLayer(InterfacePart):
    """An attention layer."""

    encoding: str
    on_cpu: str | None = None
    """What runs it on a CPU, where that is no engine; for `report`."""
    on_gpu: str | None = None
    """The same for a GPU."""
    shares_sequences = False
    """Whether it can be one of several ranks that share a sequence (context_parallel)."""

    @staticmethod
    def encoding_of(module: Any) -> str | None:
        """The encoding of this module, where it depends on its configuration."""
        return None

    @classmethod
    def plan_of(
        cls, module: Any, position_bias: Any, scaling: float | None, query: Tensor, kwargs: dict[str, Any]
    ) -> Callable[[Positions], Plan] | None:
        """positions -> the plan of this call. None: `position_bias` is dense, or there is none."""
        raise NotImplementedError

    @staticmethod
    def sample(module: Any, length: int) -> Sample:
        """A typical call, for `report`, where `on_cpu` and `on_gpu` do not say what runs."""
        raise NotImplementedError


@dataclass(frozen=True)
class Family:
    """`tiny(folder)` -> (a random model of this folder of transformers.models, the inputs of a call), both small."""

    tiny: Callable[[str], tuple[nn.Module, dict[str, Any]]]
    parts: tuple[Any, ...] = ()
    """InterfacePart, InterfaceLayer, Part and Layer subclasses."""
    hooks: Mapping[type, Callable] = field(default_factory=dict)
    """Class of transformers (or its Part) -> a forward pre-hook, for modules that are not parts."""


def variants(base: type, *names: str) -> tuple[Any, ...]:
    """A part for each "folder.Class" of transformers.models (or "folder.file.Class") that is a copy of one design. One that this
    release does not have is left out: its models are refused, and not those of the other folders."""
    found = []
    for name in names:
        folder, *file, cls = name.split(".")
        path = f"transformers.models.{folder}.{file[0] if file else f'modeling_{folder}'}"
        try:
            original = getattr(importlib.import_module(path), cls)
        except (ImportError, AttributeError):
            continue
        bases = (base, original) if issubclass(base, nn.Module) else (base,)
        found.append(type(cls, bases, {"original": original, "__module__": base.__module__}))
        setattr(sys.modules[base.__module__], cls, found[-1])  # where pickle looks for it
    return tuple(found)


def tiny_model(name: str, **config: Any) -> Any:
    """transformers' {name}Model of {name}Config(**config)."""
    import transformers

    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
"""Of tiny models, as most configurations call them."""


def tiny_text(length: int = 170) -> dict[str, Tensor]:
    """Two texts of tokens from 2 to 31, the second padded; long enough for an engine to run, not PyTorch's attention."""
    ids = torch.arange(2 * length).reshape(2, length) % 30 + 2
    mask = torch.ones_like(ids)
    mask[1, length * 2 // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def folder_of(cls: type) -> str | None:
    """The folder of transformers.models that a class comes from."""
    names = cls.__module__.split(".")
    return names[2] if names[:2] == ["transformers", "models"] and len(names) > 2 else None


@cache
def load(folder: str) -> Family | str:
    """The family of a folder, or why it cannot be used with this transformers."""
    import transformers

    try:
        family: Family = importlib.import_module(f"posenc.hf.{FOLDERS[folder]}").FAMILY
    except (ImportError, AttributeError) as error:
        return f"{folder} is refused with transformers {transformers.__version__}: {error}"
    reason = next(
        (found for part in family.parts if folder_of(part.original) == folder and (found := _changed(part))), None
    )
    return family if reason is None else f"{folder} is refused with transformers {transformers.__version__}: {reason}"


def _changed(part: Any) -> str | None:
    """What the original has no longer."""
    for method, names in part.relies_on.items():
        found = getattr(part.original, method, None)
        where = f"{part.original.__name__}.{method}"
        if found is None:
            return f"{where} is gone"
        given = [name for name in inspect.signature(found).parameters if name != "self"]
        if tuple(given[: len(names)]) != names:
            return f"{where} takes ({', '.join(given)}), and posenc relies on ({', '.join(names)})"
    return None


@cache
def check_numbers(folder: str) -> str | None:
    """What differs between the original and the accelerated tiny model of this folder, or None. It runs once in a process."""
    import transformers

    from . import rules
    from .swap import install, restore

    family = load(folder)
    assert isinstance(family, Family)
    with _usual_defaults(), torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the original are its own
        torch.manual_seed(0)
        model, inputs = family.tiny(folder)
        # the weights that models begin with make attention next to nothing of the output
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
        reason = compare(model.eval(), lambda one: install(one, check=False), inputs)
        restore(model)
        if reason is None:  # once more as a longer text runs
            with rules.suspended():
                reason = compare(model, lambda one: install(one, check=False), inputs)
            restore(model)
    return None if reason is None else f"{folder} is refused with transformers {transformers.__version__}: {reason}"


@contextmanager
def _usual_defaults() -> Iterator[None]:
    """A CPU and float32, whatever the caller's defaults are: a check is made once, for all later calls."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), no_autocast(torch.device("cpu")):
            yield
    finally:
        torch.set_default_dtype(dtype)


def compare(model: nn.Module, change: Callable[[nn.Module], Any], inputs: dict[str, Any]) -> str | None:
    """How a model's output differs after a change, or None; outputs at padding are not compared: the originals' own change from
    release to release (Parakeet's were NaN, then zeros, then means)."""
    try:
        given = model(**copy.deepcopy(inputs))
        theirs, real = first(given), getattr(given, "attention_mask", inputs.get("attention_mask"))
        change(model)
        ours = first(model(**inputs))
    except Exception as error:  # a future release may raise anything
        return f"its tiny model raises {type(error).__name__}: {str(error).strip()[:300]}"
    if real is not None and real.shape == theirs.shape[:2] and real.shape == ours.shape[:2]:
        ours, theirs = ours[real != 0], theirs[real != 0]
    if ours.shape != theirs.shape:
        return f"its output is {list(ours.shape)}, and that of the original {list(theirs.shape)}"
    worst, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    eps = torch.finfo(theirs.dtype).eps
    return None if worst <= 1e3 * eps * max(size, 1.0) else f"its output differs by {worst:.1e} of {size:.1e}"


def first(output: Any) -> Tensor:
    """The first tensor of a model's output."""
    return output if isinstance(output, Tensor) else (output if isinstance(output, tuple) else output.to_tuple())[0]


def replace_methods(module: nn.Module, part: type[InterfacePart]) -> None:
    """Put the functions of `part.replaces` before the methods of this instance; `put_back` undoes it."""
    for path, function in part.replaces.items():
        child, _, name = path.rpartition(".")
        target = module.get_submodule(child) if child else module
        target.__dict__[_place(target, name)] = partial(run_replaced, function, module, target, name)
        target.__dict__["posenc_replaced"] = (*target.__dict__.get("posenc_replaced", ()), name)


def _place(target: nn.Module, name: str) -> str:
    """Where an instance keeps its own method: accelerate's hooks take the place of forward and call what was there."""
    return "_old_forward" if name == "forward" and "_old_forward" in target.__dict__ else name


def run_replaced(function: Callable, owner: Any, target: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    original = partial(getattr(type(target), name), target)
    if owner.config._attn_implementation != "posenc":
        return original(*args, **kwargs)
    return function(owner, original, *args, **kwargs)


def put_back(module: nn.Module) -> None:
    for name in module.__dict__.get("posenc_replaced", ()):
        place = _place(module, name)
        if place == name:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[place] = MethodType(getattr(type(module), name), module)
