"""accelerate, restore, report: attention of one loaded model on posenc's engines, undone, listed.

Everything is checked before anything is changed.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from .. import ENGINES, Plan, Positions, explain
from . import family as families
from .family import FOLDERS, INTERFACE, OVERRIDE, READ_TABLES, Family, InterfaceLayer, InterfacePart
from .layer import Layer, Part, change_class, own_class, zeros_beside

Model = TypeVar("Model", bound=nn.Module)
"""The class of the caller's model."""
NAME = "posenc"


class UnsupportedModel(ValueError):
    """A model, or a part of one, that posenc.hf does not support; nothing was changed.

    >>> issubclass(posenc.hf.UnsupportedModel, Exception)
    True
    """


def require_model(model: Any) -> None:
    """Raise a TypeError for what is no loaded model."""
    if isinstance(model, nn.Module):
        return
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"an object of class {type(model).__name__}"
    inner = getattr(model, "model", None)
    if isinstance(model, str):
        hint = f"load it: AutoModel.from_pretrained({model!r})"
    elif isinstance(inner, nn.Module):
        hint = "give its model, .model"
    else:
        hint = "load one with from_pretrained"
    raise TypeError(f"model must be a loaded model, a torch.nn.Module, got {kind}; {hint}")


def accelerate(
    model: Model, *, engine: str = "auto", context_parallel: Any = None, strategy: str | None = None,
    verify: bool = False,
) -> Model:  # fmt: skip
    """Run the attention of a loaded transformers model on posenc's engines; returns the same model.

        model = posenc.hf.accelerate(T5ForConditionalGeneration.from_pretrained(...))

    The outputs, the parameters, the state_dict, `generate` and training stay the same; the dense position biases and
    masks are gone. Layers that call transformers' attention interface go through it (attn_implementation="posenc"), others
    are overridden; `report` lists the way of each. `restore` undoes it.

    engine             a name of `posenc.ENGINES`, or "auto"
    context_parallel   mesh["cp"] or a posenc.parallel.ContextParallel: ranks share each sequence in training. Every tensor
                       that the model gets is this rank's part (posenc.parallel.split_sequence). T5, mT5, UMT5, DeBERTa,
                       BLOOM and MPT. Take the loss from the logits: labels that a model shifts by one token cross ranks
    strategy           "ulysses", "gather", "ring" or "auto"
    verify             also compare outputs and gradients of this model itself, on its `dummy_inputs`, with the original's

    The first use of a family in a process compares a tiny random model of it with the original. A family whose check fails
    is refused, with what changed; no version of transformers is.

    Raises UnsupportedModel for a model without such attention, and changes nothing then; TypeError for what is no model.

        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=32, vocab_size=50)).eval()
        >>> model = posenc.hf.accelerate(model)
        >>> model(torch.zeros(1, 7, dtype=torch.long)).last_hidden_state.shape  # [B, L, d_model]
        torch.Size([1, 7, 32])
    """
    require_model(model)
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is unknown; use 'auto' or one of {', '.join(map(repr, ENGINES))}")
    context = None
    if context_parallel is not None:
        from ..parallel.context import as_context

        context = as_context(context_parallel, strategy)  # type: ignore[arg-type]
    elif strategy is not None:
        raise ValueError(f"strategy={strategy!r} goes with context_parallel=mesh['cp']")
    expected = _outcome(model) if verify else None
    install(model, engine=engine, context=context)
    if expected is not None:
        try:
            reason = _difference(expected, _outcome(model))
        except Exception as error:  # an unknown model may raise anything
            reason = f"raises {type(error).__name__}: {error}"
        if reason is not None:
            restore(model)
            raise UnsupportedModel(f"nothing was changed, because this model, accelerated, {reason}")
    return model


def install(model: nn.Module, *, engine: str = "auto", context: Any = None, check: bool = True) -> None:
    """`accelerate` after its arguments are checked; check=False: without the comparison of numbers."""
    found = _survey(model, check)
    if context is not None:
        found.refused += _refuse_context(model, found)
    if found.refused:
        raise UnsupportedModel("nothing was changed, because " + "; ".join(dict.fromkeys(found.refused)))
    calls = any(calls_interface(type(module)) for module in model.modules())
    if not calls and not found.parts and not any(isinstance(module, Part) for module in model.modules()):
        kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
        raise UnsupportedModel(
            f"{type(model).__name__} ({kind}) has no attention layer that calls transformers' attention interface, and none "
            f"that posenc.hf overrides; it supports models that do, and {', '.join(sorted(FOLDERS))}"
        )
    for module, part in found.parts:
        if issubclass(part, Part):
            change_class(module, part)
            module.posenc_prepare()
        else:
            _prepare(module, part)
    for module, hook in found.hooks:
        module.__dict__["posenc_hook"] = module.register_forward_pre_hook(hook, with_kwargs=True)
    if calls:
        _set_implementation(model)
    for module in model.modules():
        own = module.__dict__
        if isinstance(module, Part) or "posenc_hook" in own or calls_interface(type(module)):
            own["posenc_engine"] = engine
        own.pop("posenc_context", None)
        if context is not None and (isinstance(module, Part) or "posenc_part" in own or "posenc_hook" in own):
            own["posenc_context"] = context
    if context is not None and "posenc_labels_hook" not in model.__dict__:
        model.__dict__["posenc_labels_hook"] = model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)


def _prepare(module: Any, part: type[InterfacePart]) -> None:
    module.__dict__.update(part.prepare(module), posenc_part=part)
    if issubclass(part, InterfaceLayer):
        module.__dict__["posenc_layer"] = part
    families.replace_methods(module, part)
    if part.hook is not None and part.needs_hook(module):
        module.__dict__["posenc_hook"] = module.register_forward_pre_hook(part.hook, with_kwargs=True)


def _set_implementation(model: nn.Module) -> None:
    """attn_implementation="posenc", as the model's own method does it; a bare encoder has none."""
    from . import interface  # noqa: F401  registers the name

    if "posenc_implementations" not in model.__dict__:
        model.__dict__["posenc_implementations"] = [(one, one._attn_implementation) for one in _configs(model)]
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(NAME)
    for module in model.modules():
        config = getattr(module, "config", None)
        if calls_interface(type(module)) and getattr(config, "_attn_implementation", NAME) != NAME:
            config._attn_implementation = NAME  # type: ignore[union-attr]


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration in a model that has an attention implementation, outer ones first."""
    found: dict[int, Any] = {}
    todo: list[Any] = [
        one for one in (getattr(x, "config", None) for x in model.modules()) if hasattr(one, "sub_configs")
    ]
    while todo:
        config: Any = todo.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            todo += [one for name in config.sub_configs if hasattr(one := getattr(config, name, None), "sub_configs")]
    return list(found.values())


def _calls_interface(cls: Any) -> bool:
    """Whether modules of this class call transformers' attention interface themselves."""
    forward = getattr(cls, "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


calls_interface: Callable[[Any], bool] = cache(_calls_interface)


def _refuse_context(model: nn.Module, found: _Found) -> list[str]:
    """Why the ranks cannot share this model's sequences."""
    shares = {id(module) for module, part in found.parts if _shares(part)}
    refused = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_layer = isinstance(module, Layer) or calls_interface(type(module)) or id(module) in found.layers
        is_known = id(module) in shares or _shares(module.__dict__.get("posenc_part", type(module)))
        if is_layer and not is_known:
            refused.append(f"{kind} cannot share a sequence among ranks (context_parallel)")
        if getattr(module, "conv", None) is not None and isinstance(module.conv, nn.Module):
            refused.append(f"{name} has a convolution over tokens, which would cross ranks (context_parallel)")
        if kind.endswith(("ForSequenceClassification", "ForMultipleChoice", "ForQuestionAnswering")):
            refused.append(f"{kind} pools tokens of the whole sequence; share its base model's instead")
    return refused


def _shares(part: Any) -> bool:
    return getattr(part, "posenc_shares_sequences", False) or getattr(part, "shares_sequences", False)


def _refuse_labels(model: Any, args: tuple, kwargs: dict[str, Any]):
    """Models that shift labels by one token would shift them within each rank's part."""
    shifts = type(model).__name__.endswith(("ForConditionalGeneration", "ForCausalLM", "LMHeadModel"))
    if shifts and kwargs.get("labels") is not None and kwargs.get("decoder_input_ids") is None:
        raise ValueError(
            f"{type(model).__name__} shifts its labels by one token, across ranks of context_parallel; shift them before "
            "split_sequence, and compute the loss from the logits (an encoder-decoder: give decoder_input_ids)"
        )
    return args, kwargs


def restore(model: Model) -> Model:
    """Undo `accelerate` and `extend`; returns the same model.

    Raises TypeError for what is no model; one that was not changed stays as it is.

        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(num_layers=1, d_model=32, d_kv=8, num_heads=4, d_ff=32, vocab_size=50))
        >>> posenc.hf.restore(posenc.hf.accelerate(model)) is model
        True
    """
    require_model(model)
    if any("posenc_before" in module.__dict__ for module in model.modules()):
        importlib.import_module("posenc.hf.extension").undo(model)
    for config, implementation in model.__dict__.get("posenc_implementations", ()):
        config._attn_implementation = implementation
    for module in model.modules():
        families.put_back(module)
        for hook in ("posenc_hook", "posenc_labels_hook"):
            if hook in module.__dict__:
                module.__dict__[hook].remove()
        for name in [name for name in module.__dict__ if name.startswith("posenc_")]:
            del module.__dict__[name]
        if isinstance(module, Part):
            change_class(module, module.original)
    return model


@dataclass
class Accelerated:
    """One line of a report."""

    name: str
    layer: str
    encoding: str
    engine: str
    way: str
    """interface (with the methods of the instance that are replaced), or override."""


@dataclass
class Report:
    """The layers that run on posenc: one entry of `layers` for each. str() groups them."""

    model: str
    layers: list[Accelerated] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.model}: nothing is accelerated"
        groups = Counter((one.layer, one.encoding, one.engine, one.way) for one in self.layers)
        counted = [(count, *group) for group, count in groups.items()]
        lines = [f"{n:>4} × {layer} ({encoding}) on {engine}, by {way}" for n, layer, encoding, engine, way in counted]
        return "\n".join([f"{self.model}: {len(self.layers)} attention layers run on posenc", *lines])


def report(model: nn.Module, *, length: int = 512) -> Report:
    """Which layers run on posenc, by which way, and which engine would run each on inputs of this length.

    Raises TypeError for what is no model; where nothing is swapped, the report says so.

        >>> from transformers import T5Config, T5EncoderModel
        >>> model = T5EncoderModel(T5Config(num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=32, vocab_size=50))
        >>> len(posenc.hf.report(posenc.hf.accelerate(model)).layers)
        2
    """
    require_model(model)
    result = Report(type(model).__name__)
    for name, module in model.named_modules():
        own, config = module.__dict__, getattr(module, "config", None)
        sample: Callable[[int], Any]
        if isinstance(module, Layer):
            encoding, sample, way = module.encoding, module.posenc_sample, OVERRIDE
        elif calls_interface(type(module)) and getattr(config, "_attn_implementation", "") == NAME:
            layer: type[InterfaceLayer] | None = own.get("posenc_layer")
            way = INTERFACE
            if layer is None:
                encoding, sample = "no term", _plain_sample(module)
            else:
                encoding, sample = layer.encoding_of(module) or layer.encoding, partial(layer.sample, module)
                way += "".join(f", {one} replaced" for one in layer.replaces)
        else:
            continue
        engine = _engine(module, own.get("posenc_engine", "auto"), sample, length)
        result.layers.append(Accelerated(name, type(module).__name__, encoding, engine, way))
    return result


def _plain_sample(module: Any) -> Callable[[int], Any]:
    config = module.config
    heads = getattr(module, "num_attention_heads", None) or getattr(module, "num_heads", None)
    heads = heads or getattr(config, "num_attention_heads", None) or 1
    heads = heads if isinstance(heads, int) else 1  # Swin's configuration has a list of them, one for each stage
    size = getattr(module, "head_dim", None) or getattr(config, "hidden_size", 64) // heads
    causal = bool(getattr(module, "is_causal", False))
    return lambda length: (heads, size, Plan(Positions(length)), {"causal": causal})


def _engine(module: nn.Module, engine: str, sample: Callable[[int], Any], length: int) -> str:
    if engine != "auto":
        return engine
    part = module.__dict__.get("posenc_part", type(module))
    own = getattr(part, "on_cpu" if zeros_beside(module, 0).is_cpu else "on_gpu", None)
    if own is not None:
        return own
    with _sharded_weights_beside_plain_tensors(module):
        heads, size, plan, options = sample(length)
    q = zeros_beside(module, 1, heads, plan.positions.q_length, size)
    return explain(q, q, q, plan, **options).engine


def _sharded_weights_beside_plain_tensors(module: nn.Module) -> AbstractContextManager[Any]:
    """A sample is made outside of forward, where fully_shard's weights are distributed tensors."""
    if not any(hasattr(parameter, "full_tensor") for parameter in module.parameters()):
        return nullcontext()
    return importlib.import_module("torch.distributed.tensor.experimental").implicit_replication()


@dataclass
class _Found:
    parts: list[tuple[nn.Module, Any]] = field(default_factory=list)
    hooks: list[tuple[nn.Module, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    layers: set[int] = field(default_factory=set)
    """ids of the modules that a family overrides"""


def _survey(model: nn.Module, check: bool) -> _Found:
    """What to change, and what cannot be changed; changes nothing."""
    found = _Found()
    for name, module in model.named_modules():
        for folder, family in _families(module):
            if isinstance(family, str):
                found.refused.append(family)
                continue
            is_known = False
            originals, kind = [part.original for part in family.parts], own_class(type(module))
            for part in family.parts:
                if kind is part.original:
                    is_known = part.concerns(module)
                    if not is_known or "posenc_part" in module.__dict__:
                        continue
                    reason = part.refuses(module) or _offloaded(module, folder) or _index_error(module, part)
                    if reason is None:
                        found.parts.append((module, part))
                        if issubclass(part, (Layer, InterfaceLayer)):
                            found.layers.add(id(module))
                    else:
                        found.refused.append(f"{name} ({type(module).__name__}) {reason}")
                elif isinstance(module, part.original) and not isinstance(module, Part) and kind not in originals:
                    found.refused.append(
                        f"{name} is a {type(module).__name__}, a subclass of {part.original.__name__} "
                        "whose own forward would be lost"
                    )
            if is_known and check and (reason := families.check_numbers(folder)):
                found.refused.append(reason)
            hook = family.hooks.get(kind)
            if hook is not None and "posenc_hook" not in module.__dict__:
                found.hooks.append((module, hook))
    return found


def _offloaded(module: nn.Module, folder: str) -> str | None:
    hooks = [one.__dict__.get("_hf_hook") for one in module.modules()]
    if FOLDERS[folder] in READ_TABLES and any(getattr(hook, "offload", False) for hook in hooks):
        return "has weights that accelerate offloads, and posenc reads them between calls; load it without offloading"
    return None


def _index_error(module: Any, part: type) -> str | None:
    try:
        if issubclass(part, Layer):
            part.posenc_index_of(module)
        elif issubclass(part, InterfacePart):
            missing = [name for name in part.attributes if not hasattr(module, name)]
            if missing:
                return f"has no {', '.join(missing)}, which posenc relies on"
            part.prepare(module)
    except ValueError as error:
        return f"has distances that posenc cannot index: {error}"
    return None


def _families(module: nn.Module) -> Iterator[tuple[str, Family | str]]:
    """The families for the classes of this module's ancestry."""
    done = set()
    for cls in type(module).__mro__:
        folder = families.folder_of(cls)
        if folder in FOLDERS and folder not in done:
            done.add(folder)
            yield folder, families.load(folder)


def _outcome(model: Any) -> tuple[Any, dict[str, Any]]:
    """The output of a model on its dummy inputs, the last third of a row padded, and its gradients; dropout off."""
    inputs = dict(model.dummy_inputs)
    device = next(model.parameters()).device
    inputs = {name: x.to(device) if hasattr(x, "to") else x for name, x in inputs.items()}
    tokens = inputs.get("input_ids")
    if tokens is not None and "attention_mask" not in inputs:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][-1, -(tokens.shape[1] // 3) :] = 0
    was, kept = model.training, {name: p.grad for name, p in model.named_parameters()}
    model.eval()
    model.zero_grad()
    with torch.enable_grad():
        output = families.first(model(**inputs))
        real = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
        if real is not None and output.shape[:2] == real.shape:
            output = output[real.bool()]
        output.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():
        p.grad = kept[name]
    model.train(was)
    return output.detach(), gradients


def _difference(theirs: tuple[Any, dict[str, Any]], ours: tuple[Any, dict[str, Any]]) -> str | None:
    eps = torch.finfo(theirs[0].dtype).eps
    worst, size = (ours[0] - theirs[0]).abs().max().item(), theirs[0].abs().max().item()
    if not worst <= 1e4 * eps * max(size, 1.0):
        return f"gives outputs that differ by {worst:.1e} of {size:.1e}"
    if ours[1].keys() != theirs[1].keys():
        return f"gives no gradients, or others, for {', '.join(sorted(ours[1].keys() ^ theirs[1].keys())[:3])}"
    largest = max(one.norm().item() for one in theirs[1].values())
    for name, wanted in theirs[1].items():
        off = (ours[1][name] - wanted).norm().item()
        if not off <= 1e4 * eps * largest:
            return f"gives a gradient of {name} that differs by {off:.1e} of {wanted.norm().item():.1e}"
    return None
