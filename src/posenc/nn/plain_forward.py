"""`Attention.forward` of consecutive tokens without masks, which is most of what a layer does: no detours.

    x ─ embed ─▶ q, k, v ─ rotate ─▶ cache ─▶ attention with the plan's terms ─▶ projection

What `resolve_sequence` would find out is known here. Eager code takes the short way of each step: linear maps without hooks are
called as functions, heads are views, and where nothing is left to add there is no plan. A layer of one token or of a short text
on a GPU is a few hundred microseconds of such steps, so each of them counts; tests/nn/test_work.py pins how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from ..core.dropout import draw_once
from ..core.mask import MaskOptions
from ..core.plan import Plan
from ..core.positions import consecutive
from ..functional import attend, attend_plain, prepare_repeated, run_repeated
from .cache import LayerCache, is_training
from .sequence import embed_counted

if TYPE_CHECKING:
    from .attention import Attention

PLAIN = (Tensor, nn.Parameter)
WINDOW = frozenset(("window",))


def forward(layer: Attention, x: Tensor, slot: LayerCache | None, masks: MaskOptions) -> Tensor:
    """x [B, L, d_model] -> [B, L, d_model], behind the tokens of the slot. masks: those of tokens, over all keys (`resolve_masks`)."""
    # nn.Module looks submodules up last of all, which takes as long as a small operation
    modules: dict[str, Any] = layer._modules
    encoding = modules["encoding"]
    is_eager = not torch.compiler.is_compiling()
    batch, queries, _ = x.shape
    past = 0 if slot is None else slot.length
    marks = {"key_mask": masks["key_mask"].expand(batch, -1)} if slot is not None and "key_mask" in masks else {}
    if encoding.embeds:
        if encoding.absolute and ("key_mask" in masks or "documents" in masks):
            x = embed_counted(encoding, x, masks.get("key_mask"), masks.get("documents"), past)  # type: ignore[arg-type]
        else:
            x = encoding.embed_run(x, past)
    if is_eager and type(x) in PLAIN and x.numel() and not _has_any_global_hook():
        by_rows = True
        q, k, v = _project_heads(modules, x, batch, queries, layer.head_dim)
    else:
        by_rows = False
        q, k, v = layer._heads(layer.q_proj(x)), layer._heads(layer.k_proj(x)), layer._heads(layer.v_proj(x))
    heads = q.shape[1]
    on_cpu = q.is_cpu
    if layer.window is not None:
        masks["window"] = layer.window
    is_usual = is_eager and layer.engine == "auto" and heads == layer.heads
    dropout = layer.dropout if layer.training else 0.0
    if dropout and on_cpu and is_usual:
        dropout = draw_once(dropout, q.device)
    is_short = is_usual and (on_cpu or (q.is_cuda and masks.keys() <= WINDOW and not dropout))
    # without terms; on a GPU PyTorch's attention aligns causality otherwise where there are fewer queries than keys
    is_plain = is_short and (on_cpu or not (masks or (layer.causal and past and queries > 1)))
    if is_plain and by_rows and not encoding.acts_inside:  # nothing is left to do in attention
        every = (k, v) if slot is None else slot.append_in_place(k, v)
        out = None if every is None else attend_plain(q, *every, None, layer.causal, masks, dropout)
        if out is not None:
            out = (out.transpose(1, 2) if queries > 1 else out).reshape(batch * queries, heads * v.shape[3])
            out = _project(modules["o_proj"], out, batch, queries).view(batch, queries, -1)
            if slot is not None:  # last: an error above leaves the cache unchanged
                slot.length, slot.marks = past + queries, marks
            return out
    known = plan = appended = out = prepared = None
    kind: Any = None
    rotates_here = False
    if not is_short or encoding.acts_inside:
        rotates_here = encoding.rotates and not encoding.length_dependent
        rotates_here = rotates_here and (slot is not None or (is_usual and not encoding.adds_terms))
        is_steady = is_short and not dropout and encoding.steady_terms and not torch.is_grad_enabled()
        if masks and on_cpu:
            taken = ("key_mask",) if queries == 1 else ("key_mask", "documents") if past == 0 else ()
            is_steady = is_steady and all(name in taken for name in masks)
        is_steady = is_steady and not (on_cpu and torch.is_autocast_enabled("cpu"))
        if is_steady and encoding.rotates == rotates_here and (past == 0 or queries == 1 or on_cpu):
            prepared = encoding.prepared_terms()
            kind = ("token" if queries == 1 else "tokens") if past else "text"
            kind = " ".join(("causal" if layer.causal and queries > 1 else "", *masks, kind)), layer.window
            known = None if prepared is None else prepared.get(kind)
        if known is None and (not is_short or encoding.adds_terms or encoding.rotates != rotates_here):
            plan = _make_plan(layer, encoding, x, past, queries, rotates_here)
            if heads != layer.heads:
                plan = layer._own_heads(plan, q)
        if rotates_here:
            if plan is not None:
                q, plan = plan.take_shift(q)
            q, k, v = encoding.rotate_run(q, k, v, past)
    if slot is not None:
        every = slot.append_in_place(k, v) if by_rows else None
        if every is not None:
            k, v = every
        else:
            appended = slot.append(k, v, differentiable=is_training(layer, q))
            k, v = appended.k, appended.v
    if known is not None:
        out = run_repeated(known, q, k, v, layer.causal, masks)
        if out is None:
            plan = _make_plan(layer, encoding, x, past, queries, rotates_here)
    if plan is None:
        if is_plain and out is None:
            out = attend_plain(q, k, v, None, layer.causal, masks, dropout)
    elif is_short and on_cpu:
        out = attend_plain(q, k, v, plan, layer.causal, masks, dropout)
    is_done = out is not None
    if out is None:
        if plan is None and is_eager and not on_cpu:  # `attend` finds it again by its facts
            plan = _make_plan(layer, encoding, x, past, queries, True)
        out = _attend(layer, q, k, v, plan, masks, dropout)
    if prepared is not None and plan is not None and (is_done or not on_cpu) and not (known and known.is_final):
        prepared[kind] = prepare_repeated(q, k, v, plan, layer.causal, masks)
    if queries > 1:
        out = out.transpose(1, 2)
    width = heads * v.shape[3]  # either way a token's numbers lie side by side
    if by_rows:
        out = _project(modules["o_proj"], out.reshape(batch * queries, width), batch, queries).view(batch, queries, -1)
    else:
        out = layer.o_proj(out.reshape(batch, queries, width))
    if slot is not None:  # last: an error above leaves the cache unchanged
        if appended is not None:
            slot.commit(appended, marks)
        else:
            slot.length, slot.marks = past + queries, marks
    return out


def attend_context(layer: Attention, x: Tensor, context: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """Cross-attention [B, L, d_model] to a context [B, M, d_model], with an encoding that has no part in it; None: the general way."""
    modules: dict[str, Any] = layer._modules
    encoding = modules["encoding"]
    if encoding.acts_inside or encoding.embeds or encoding.keeps or layer.engine != "auto" or layer.window is not None:
        return None
    if torch.compiler.is_compiling() or type(x) not in PLAIN or type(context) not in PLAIN or _has_any_global_hook():
        return None
    if not (x.is_cpu and context.is_cpu and x.numel() and context.numel()):
        return None
    batch, queries, _ = x.shape
    keys, size = context.shape[1], layer.head_dim
    rows, others = x.flatten(0, 1), context.flatten(0, 1)
    q = _project(modules["q_proj"], rows, batch, queries).view(batch, queries, -1, size).transpose(1, 2)
    k = _project(modules["k_proj"], others, batch, keys).view(batch, keys, -1, size).transpose(1, 2)
    v = _project(modules["v_proj"], others, batch, keys).view(batch, keys, -1, size).transpose(1, 2)
    masks: MaskOptions = {} if key_mask is None else {"key_mask": key_mask}
    dropout = draw_once(layer.dropout, q.device) if layer.training and layer.dropout else 0.0
    out = attend_plain(q, k, v, None, False, masks, dropout)
    if out is None:
        out = attend(q, k, v, dropout=dropout, **masks)
    out = out.transpose(1, 2).reshape(batch * queries, -1)
    return _project(modules["o_proj"], out, batch, queries).view(batch, queries, -1)


def _project_heads(
    modules: dict[str, Any], x: Tensor, batch: int, length: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, heads, L, D] of x [B, L, d_model]."""
    rows = x.flatten(0, 1)  # as a matrix product takes it: once for all three
    q = _project(modules["q_proj"], rows, batch, length)
    k = _project(modules["k_proj"], rows, batch, length)
    v = _project(modules["v_proj"], rows, batch, length)
    if length == 1:  # the same numbers in the same order
        return q.view(batch, -1, 1, size), k.view(batch, -1, 1, size), v.view(batch, -1, 1, size)
    shape = (batch, length, -1, size)
    return q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)


def _project(projection: nn.Module, rows: Tensor, batch: int, length: int) -> Tensor:
    """projection(x) of x [B, L, n], given as rows [B * L, n]. A plain linear map without hooks is called as a function and gives
    rows: a module's own call takes a tenth of the product's time where x is a token."""
    own = projection.__dict__
    if (
        type(projection) is not nn.Linear or own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
        or own["_backward_pre_hooks"] or "forward" in own
    ):  # fmt: skip
        return projection(rows.view(batch, length, rows.shape[1]))
    parameters = own["_parameters"]
    return linear(rows, parameters["weight"], parameters["bias"])


def _attend(
    layer: Attention, q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, masks: MaskOptions, dropout: float
) -> Tensor:
    """Any call: dropout, engines by name, terms on a GPU, masks that `attend_plain` does not take."""
    if plan is not None:
        k, v = as_appended(k, v, plan)
    masks["causal"] = layer.causal
    return attend(q, k, v, plan, dropout=dropout, engine=layer.engine, **masks)


def _make_plan(layer: Attention, encoding: Any, x: Tensor, past: int, queries: int, rotates_here: bool) -> Plan:
    every = consecutive(past, queries, 0, past + queries)
    if encoding.rotates_or_plans and not rotates_here:
        return encoding.plan(every, x=x, host=layer)
    if torch.compiler.is_compiling() or not encoding.steady_terms or torch.is_grad_enabled():
        return encoding.terms(every, x=x, host=layer)
    prepared = encoding.prepared_terms()
    kind = "terms", x.get_device()
    plan = None if prepared is None else prepared.get(kind)
    if plan is not None:
        return plan.at(every)
    plan = encoding.terms(every, x=x, host=layer)
    if prepared is not None:
        prepared[kind] = plan
    return plan


def as_appended(k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each head of channels that the plan appends to the keys (grouped queries)."""
    if plan.append is None or plan.append[1].shape[1] <= k.shape[1]:
        return k, v
    groups = plan.append[1].shape[1] // k.shape[1]
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
