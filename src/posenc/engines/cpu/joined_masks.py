"""All masks of a call as one that is added to the scores. It is kept: the layers of a model share their padding.

    key_mask [B, Lk], documents [B, L] ×2, mask [B, H, Lq, Lk], causality, window  ─▶  hidden [B or 1, H or 1, Lq or 1, Lk]: 0 or -inf

A kept one is found by the address of the padding and used only where its values equal a copy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.mask import Mask, MaskOptions, Window
from ...core.memo import Memo
from .dense_terms import hide, limits_of
from .head_block import NEG_INF

ALL = slice(None)


class Joined(NamedTuple):
    mask: Mask
    """What was joined; a kept one has copies."""
    hidden: Tensor
    is_empty: Tensor | None


_kept = Memo(most=32, numbers=1 << 23)


def key_of(q: Tensor, k_length: int, masks: MaskOptions) -> tuple | None:
    """What a kept mask is found by; None: it would not be asked for again (a dense mask, a decoding step), or there is none."""
    key_mask, documents, window = masks.get("key_mask"), masks.get("documents"), masks.get("window")
    batch, _, q_length, _ = q.shape
    is_causal = masks.get("causal", False)
    if masks.get("mask") is not None or (is_causal and q_length != k_length):
        return None
    given = () if documents is None else documents if isinstance(documents, tuple) else (documents,)
    tokens = given if key_mask is None else (key_mask, *given)
    if not tokens:
        return None
    for one in tokens:
        if type(one) is not Tensor or not one.is_cpu or one.is_nested or one.layout is not torch.strided:
            return None
    if isinstance(window, list):
        window = tuple(window)
    first, is_double = tokens[0], q.dtype == torch.float64
    return (first.data_ptr(), first.dtype, key_mask is None, len(tokens), batch, q_length, k_length, is_causal, window, is_double)  # fmt: skip


def find(key: tuple | None, masks: MaskOptions) -> Joined | None:
    """The kept mask of a key, where it was made of the same numbers."""
    found = None if key is None else _kept.get(key)
    if found is None:
        return None
    kept, documents = found.mask, masks.get("documents")
    if kept.key_mask is not None and not kept.key_mask.equal(masks["key_mask"]):
        return None
    if documents is not None:
        pair = documents if isinstance(documents, tuple) else (documents, documents)
        for copy, given in zip(kept.documents, pair):
            if copy.dtype != given.dtype or not copy.equal(given):
                return None
    return found


def join(
    mask: Mask, limits: Window, q_length: int, k_length: int, precision: torch.dtype, *, columns: slice = ALL,
    key: tuple | None = None,
) -> Joined:  # fmt: skip
    """limits: the mask's, or none where the columns are all that they leave visible; k_length: keys in columns; key: keep it."""
    if key is None:
        return Joined(mask, *join_masks(mask, limits, q_length, k_length, precision, columns))
    with torch.inference_mode(False), torch.no_grad():
        padding = None if mask.key_mask is None else mask.key_mask.clone()
        documents = None if mask.documents is None else (mask.documents[0].clone(), mask.documents[1].clone())
        copied = Mask(mask.causal, mask.window, padding, documents)
        found = Joined(copied, *join_masks(copied, limits, q_length, k_length, precision, columns))
    _kept.put(key, found, found.hidden.numel())
    return found


def join_masks(
    mask: Mask, limits: Window, q_length: int, k_length: int, precision: torch.dtype, columns: slice = ALL
) -> tuple[Tensor, Tensor | None]:
    """[B or 1, H or 1, Lq or 1, Lk]: what is added where a key is visible (0 but for a float mask), else -inf. And which queries are
    fully masked, [.., Lq or 1, 1]; None: none. Theirs is a row of zeros, since softmax would make NaN of -inf: their outputs are to be
    set to zero, which makes their gradients zero too."""
    limited = None if limits == (None, None) else limits_of(*limits, q_length, k_length, precision)
    visible = mask.allowed_by_token(columns=columns)
    joined = hide(limited, visible, mask.added(columns=columns), precision)
    highest = joined.detach().amax(-1, keepdim=True)
    is_empty = None
    if highest.amin().item() == NEG_INF:
        is_empty = highest == NEG_INF
        joined = joined.masked_fill(is_empty, 0.0) if visible is None else joined.masked_fill_(is_empty, 0.0)
    return joined if joined.shape[3] == k_length else joined.expand(-1, -1, -1, k_length).contiguous(), is_empty
