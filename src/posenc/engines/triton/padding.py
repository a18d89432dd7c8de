"""Bounds of the real keys of each batch row, and of each token's document, in one launch instead of a dozen small PyTorch operations.

    key_mask     0 0 1 1 1 0 1 0      ->   first 2, end 7, contiguous 0
                 1 1 1 1 1 0 0 0      ->   first 0, end 5, contiguous 1
    documents    3 3 3 5 5 5 5 8      ->   0 3 of the first three tokens, 3 7, 7 8

Tiles outside first .. end are skipped; if the keys between are contiguous, tiles inside need no mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launcher import Launch


@triton.jit(do_not_specialize=["row", "length"])
def key_bounds_kernel(key_mask, row, length, bounds, BLOCK: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.int32) + length
    last = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for j0 in range(0, length, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        real = tl.load(key_mask + b * row + j, mask=j < length, other=0) != 0
        first = tl.minimum(first, tl.where(real, j, length))
        last = tl.maximum(last, tl.where(real, j + 1, 0))
        count += real.to(tl.int32)
    begin, end = tl.min(first, 0), tl.max(last, 0)
    tl.store(bounds + 3 * b, begin)
    tl.store(bounds + 3 * b + 1, end)
    tl.store(bounds + 3 * b + 2, (tl.sum(count, 0) == end - begin).to(tl.int32))


@triton.jit
def halve(ids, begin, end, own, AFTER: tl.constexpr):
    """A step of the search where ascending ids reach own; AFTER: where they exceed it."""
    is_open = begin < end
    middle = (begin + end) // 2
    x = tl.load(ids + middle, mask=is_open, other=0).to(tl.int64)
    is_before = is_open & ((x <= own) if AFTER else (x < own))
    return tl.where(is_before, middle + 1, begin), tl.where(is_open & (is_before == 0), middle, end)


@triton.jit
def store_document_bounds(
    program, own, own_row, own_length, other, row, length, steps, bounds, BLOCK: tl.constexpr, SCAN: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(own_length, BLOCK)
    b = (program // blocks).to(tl.int64)
    i = program % blocks * BLOCK + tl.arange(0, BLOCK)
    ids = other + b * row
    falls = tl.zeros([SCAN], tl.int32)
    for j0 in range(0, length - 1, SCAN):
        j = j0 + tl.arange(0, SCAN)
        valid = j < length - 1
        falls += (tl.load(ids + j, mask=valid, other=0) > tl.load(ids + j + 1, mask=valid, other=0)).to(tl.int32)
    ascends = tl.sum(falls, 0) == 0
    own_ids = tl.load(own + b * own_row + i, mask=i < own_length, other=0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.int32)
    last, first_end, last_end = first, first + length, first + length
    for _ in range(steps):  # both at once: each step waits for memory
        first, first_end = halve(ids, first, first_end, own_ids, False)
        last, last_end = halve(ids, last, last_end, own_ids, True)
    at = bounds + (b * own_length + i) * 2
    tl.store(at, tl.where(ascends, first, -1), mask=i < own_length)
    tl.store(at + 1, tl.where(ascends, last, length), mask=i < own_length)


@triton.jit(do_not_specialize=["programs", "q_row", "q_length", "q_steps", "k_row", "k_length", "k_steps"])
def document_bounds_kernel(
    programs, doc_q, q_row, q_length, q_steps, doc_k, k_row, k_length, k_steps, q_keys, k_queries, BLOCK: tl.constexpr, SCAN: tl.constexpr
):  # fmt: skip
    """The first `programs` take queries, the others keys."""
    pid = tl.program_id(0)
    if pid < programs:
        store_document_bounds(pid, doc_q, q_row, q_length, doc_k, k_row, k_length, k_steps, q_keys, BLOCK, SCAN)
    else:
        store_document_bounds(
            pid - programs, doc_k, k_row, k_length, doc_q, q_row, q_length, q_steps, k_queries, BLOCK, SCAN
        )


def find_documents(launch: Launch, doc_q: Tensor, doc_k: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [B or 1, L, 2] of queries and of keys: where each token's document begins and ends on the other side, if ids never decrease there,
    as in packed sequences; else -1 ("unknown") and the length. Ids: [B or 1, L], contiguous."""
    rows, q_length, k_length = max(doc_q.shape[0], doc_k.shape[0]), doc_q.shape[1], doc_k.shape[1]
    q_keys, k_queries = (doc_q.new_empty(rows, length, 2, dtype=torch.int32) for length in (q_length, k_length))
    programs = rows * -(-q_length // 256), rows * -(-k_length // 256)
    if sum(programs):
        q_row, k_row = (0 if ids.shape[0] == 1 else ids.shape[1] for ids in (doc_q, doc_k))
        launch(
            document_bounds_kernel, sum(programs), programs[0], doc_q, q_row, q_length, q_length.bit_length(), doc_k, k_row, k_length,
            k_length.bit_length(), q_keys, k_queries, BLOCK=256, SCAN=1024,
        )  # fmt: skip
    return q_keys, k_queries


def find_bounds(launch: Launch, key_mask: Tensor, batch: int) -> Tensor:
    """uint8 [batch or 1, L] -> int32 [batch, 3]: the first real key, the last + 1, whether all keys between are real."""
    key_mask = key_mask.contiguous()
    bounds = key_mask.new_empty(batch, 3, dtype=torch.int32)
    if batch:
        row = 0 if key_mask.shape[0] == 1 else key_mask.shape[1]
        launch(key_bounds_kernel, batch, key_mask, row, key_mask.shape[1], bounds, BLOCK=1024)
    return bounds
