"""accelerate, restore, report: swap the attention of one loaded model, undo it, list what is swapped.

Everything is checked before anything is changed.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import ENGINES, explain
from . import versions
from .layer import Layer, Part, log_once

FAMILIES = {
    "t5": "t5", "mt5": "t5", "umt5": "t5", "longt5": "longt5",
    "mpnet": "mpnet", "deberta": "deberta", "deberta_v2": "deberta", "xlnet": "xlnet",
    "wav2vec2_conformer": "conformer", "wav2vec2_bert": "conformer",
    "seamless_m4t": "conformer", "seamless_m4t_v2": "conformer",
    "bloom": "alibi", "mpt": "alibi", "inkling": "inkling",
}  # fmt: skip
"""Folder of transformers.models -> the module here that replaces its attention."""

ABSOLUTE = (
    "albert", "bart", "bert", "camembert", "distilbert", "electra", "ernie", "gpt2", "gpt_bigcode", "layoutlm",
    "marian", "mbart", "opt", "pegasus", "roberta", "seamless_m4t", "seamless_m4t_v2", "vit", "whisper", "xlm-roberta",
    "xlm-roberta-xl",
)  # fmt: skip
"""Model types whose positions enter at the input, so that their attention has nothing to swap (Seamless: of text)."""


class UnsupportedModel(ValueError):
    """A model, or a part of one, that posenc.hf does not support; nothing was changed.

    >>> issubclass(posenc.hf.UnsupportedModel, Exception)
    True
    """


def accelerate(
    model: nn.Module, *, engine: str = "auto", context_parallel: Any = None, strategy: str | None = None
) -> nn.Module:
    """Run the attention of a loaded transformers model on posenc's engines; returns the same model.

        model = posenc.hf.accelerate(T5ForConditionalGeneration.from_pretrained(...))

    The outputs, the parameters, the state_dict, `generate` and training stay the same; the dense position biases and
    masks are gone. `engine` is a name of `posenc.ENGINES`, or "auto". `restore` undoes it.

    context_parallel   mesh["cp"] or a posenc.parallel.ContextParallel: ranks share each sequence in training. Every tensor
                       that the model gets is this rank's part (posenc.parallel.split_sequence). T5, mT5, UMT5, DeBERTa,
                       BLOOM and MPT. Take the loss from the logits: labels that a model shifts by one token cross ranks
    strategy           "ulysses", "gather", "ring" or "auto"

    Raises UnsupportedModel for a model without such attention, and changes nothing then.

        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=32, vocab_size=50)).eval()
        >>> model = posenc.hf.accelerate(model)
        >>> model(torch.zeros(1, 7, dtype=torch.long)).last_hidden_state.shape  # [B, L, d_model]
        torch.Size([1, 7, 32])
    """
    versions.check()
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; use 'auto' or one of {', '.join(map(repr, ENGINES))}")
    found = _survey(model)
    context = None
    if context_parallel is not None:
        from ..parallel.context import as_context

        context = as_context(context_parallel, strategy)  # type: ignore[arg-type]
        found.refused += _refuse_context(model, found)
    elif strategy is not None:
        raise ValueError(f"strategy={strategy!r} goes with context_parallel=mesh['cp']")
    if found.refused:
        raise UnsupportedModel("nothing was changed, because " + "; ".join(found.refused))
    if not found.parts and not any(isinstance(module, Part) for module in model.modules()):
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        if kind not in ABSOLUTE:
            raise UnsupportedModel(
                f"{type(model).__name__} ({kind}) has no attention layer that posenc.hf supports; it supports "
                f"{', '.join(sorted(FAMILIES))}, passes absolute models through, and extends rotary ones (posenc.hf.extend)"
            )
        log_once(f"{kind}: positions enter at the input, so its attention has no positional part; nothing was swapped")
    for module, part in found.parts:
        module.__class__ = part
        module.posenc_prepare()
    for module, hook in found.hooks:
        module.__dict__["posenc_hook"] = module.register_forward_pre_hook(hook, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, Layer) and module.posenc_engine != engine:
            module.posenc_engine = engine
        if isinstance(module, Part) or "posenc_hook" in module.__dict__:
            module.__dict__.pop("posenc_context", None)
            if context is not None:
                module.__dict__["posenc_context"] = context
    if context is not None and "posenc_labels_hook" not in model.__dict__:
        model.__dict__["posenc_labels_hook"] = model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
    return model


def _refuse_context(model: nn.Module, found: _Found) -> list[str]:
    """Why the ranks cannot share this model's sequences."""
    parts = [part for _, part in found.parts] + [type(x) for x in model.modules() if isinstance(x, Part)]
    names = {part.original.__name__ for part in parts if issubclass(part, Layer) and not part.posenc_shares_sequences}
    refused = [f"{name} cannot share a sequence among ranks (context_parallel)" for name in sorted(names)]
    for name, module in model.named_modules():
        if getattr(module, "conv", None) is not None and isinstance(module.conv, nn.Module):
            refused.append(f"{name} has a convolution over tokens, which would cross ranks (context_parallel)")
        if type(module).__name__.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering")):
            refused.append(
                f"{type(module).__name__} pools tokens of the whole sequence; share its base model's instead"
            )
    return refused


def _refuse_labels(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Models that shift labels by one token would shift them within each rank's part."""
    shifts = type(model).__name__.endswith(("ForConditionalGeneration", "ForCausalLM", "LMHeadModel"))
    if shifts and kwargs.get("labels") is not None and kwargs.get("decoder_input_ids") is None:
        raise ValueError(
            f"{type(model).__name__} shifts its labels by one token, across ranks of context_parallel; shift them before "
            "split_sequence, and compute the loss from the logits (an encoder-decoder: give decoder_input_ids)"
        )
    return args, kwargs


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate` and `extend`; returns the same model.

    Raises nothing: a model that was not changed stays as it is.

        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=32, vocab_size=50))
        >>> posenc.hf.restore(posenc.hf.accelerate(model)) is model
        True
    """
    if any("posenc_before" in module.__dict__ for module in model.modules()):
        importlib.import_module("posenc.hf.extension").undo(model)
    for module in model.modules():
        for hook in ("posenc_hook", "posenc_labels_hook"):
            if hook in module.__dict__:
                module.__dict__[hook].remove()
        for name in [name for name in module.__dict__ if name.startswith("posenc_")]:
            del module.__dict__[name]
        if isinstance(module, Part):
            module.__class__ = module.original  # type: ignore[assignment]
    return model


@dataclass
class Swapped:
    """One line of a report."""

    name: str
    layer: str
    encoding: str
    engine: str


@dataclass
class Report:
    """What `accelerate` swapped: one entry of `layers` for each. str() groups them."""

    model: str
    layers: list[Swapped] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.model}: nothing is swapped"
        groups = Counter((one.layer, one.encoding, one.engine) for one in self.layers)
        lines = [
            f"{count:>4} × {layer} ({encoding}) on {engine}" for (layer, encoding, engine), count in groups.items()
        ]
        return "\n".join([f"{self.model}: {len(self.layers)} attention layers run on posenc", *lines])


def report(model: nn.Module, *, length: int = 512) -> Report:
    """Which layers are swapped, and which engine would run each on inputs of this length.

    Raises nothing: where nothing is swapped, the report says so.

        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=32, vocab_size=50))
        >>> len(posenc.hf.report(posenc.hf.accelerate(model)).layers)
        2
    """
    result = Report(type(model).__name__)
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            result.layers.append(Swapped(name, type(module).__name__, module.encoding, _engine(module, length)))
    return result


@dataclass
class _Found:
    parts: list[tuple[nn.Module, type[Part]]] = field(default_factory=list)
    hooks: list[tuple[nn.Module, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def _survey(model: nn.Module) -> _Found:
    """What to swap, and what cannot be swapped; changes nothing."""
    found = _Found()
    for name, module in model.named_modules():
        for family in _families(module):
            for part in family.PARTS:
                if type(module) is part.original:
                    reason = part.refuses(module) or _index_error(module, part)
                    if reason is None:
                        found.parts.append((module, part))
                    else:
                        found.refused.append(f"{name} ({type(module).__name__}) {reason}")
                elif isinstance(module, part.original) and not isinstance(module, Part):
                    found.refused.append(
                        f"{name} is a {type(module).__name__}, a subclass of {part.original.__name__} "
                        "whose own forward would be lost"
                    )
            hook = family.HOOKS.get(type(module))
            if hook is not None and "posenc_hook" not in module.__dict__:
                found.hooks.append((module, hook))
    return found


def _index_error(module: Any, part: type[Part]) -> str | None:
    try:
        if issubclass(part, Layer):
            part.posenc_index_of(module)
    except ValueError as error:
        return f"has distances that posenc cannot index: {error}"
    return None


def _families(module: nn.Module) -> Iterator:
    """The family modules for the classes of this module's ancestry."""
    found = set()
    for cls in type(module).__mro__:
        parts = cls.__module__.split(".")
        if parts[:2] == ["transformers", "models"] and len(parts) > 2:
            name = FAMILIES.get(parts[2])
            if name is not None and name not in found:
                found.add(name)
                yield importlib.import_module(f"posenc.hf.{name}")


def _engine(module: Layer, length: int) -> str:
    if module.posenc_engine != "auto":
        return module.posenc_engine
    weight = next(module.parameters())
    heads, size, plan, options = module.posenc_sample(length)
    q = torch.empty(1, heads, length, size, device=weight.device, dtype=weight.dtype)
    return explain(q, q, q, plan, **options).engine
