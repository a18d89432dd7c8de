"""The decoding kernels: one to a few queries over many keys (flash-decoding).

    query_rows     states . table for every query and distance of a wide span: the row term as plain rows [B, H, Lq, n]
    decode         a program for each key head and share of its keys; the query heads of a key head are rows of one tile, so
                   that every key and value is read once. Over a narrow span it makes the rows that it needs itself
    merge_shares   the shares' outputs, maxima and sums in a fixed order -> the output

    rows of a tile, 2 query heads for each key head, 2 queries     row      0  1  2  3  (4 .. 15: padding)
                                                                   query i  0  0  1  1
                                                                   head     0  1  0  1

Tiles are [keys, queries], and outputs [channels, queries]: keys and values are then the first operand of their products, whose 64
rows are shared out among the warps, and go from memory to the tensor cores without passing through registers. With [queries,
keys] each warp would compute the same 16 rows.

The time is that of reading the keys, so there is one loop for all tiles, and every pair has its mask. Lookups would take longer
than that: tiles whose distances all lie outside the spans, which are nearly all, add a number for each query instead.

Numbers that change from step to step (lengths, offsets, shares) are no compile-time constants, and limits that do not apply are
far away instead of absent: a model has one variant of each kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .masking import visible
from .scores import LOG2E, add_unscaled_terms, row_scale
from .structs import Masks, Terms
from .tiles import matmul, online_softmax

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(ptr, stride, start, inside, d, D: tl.constexpr):
    """Rows start + 0, 1, .. of a [L, D] matrix where `inside`, zeros elsewhere."""
    steps = tl.arange(0, inside.shape[0])
    at = ptr + start.to(tl.int64) * stride + steps[:, None] * stride + d[None, :]
    EVEN: tl.constexpr = d.shape[0] == D
    if EVEN:
        return tl.load(at, mask=inside[:, None], other=0.0)
    else:
        return tl.load(at, mask=inside[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def key_share(first, last, q_length, k_length, left, right, split, splits, BLOCK: tl.constexpr):
    """begin, end: the share `split` of the keys that are visible to one of the queries first .. last."""
    diff = k_length - q_length
    begin = tl.minimum(tl.maximum(first + diff - left, 0), k_length)
    end = tl.maximum(tl.minimum(last + diff + right + 1, k_length), begin)
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK), splits) * BLOCK
    begin = tl.minimum(begin + split * share, end)
    return begin, tl.minimum(begin + share, end)


@triton.jit
def real_keys(key_mask, begin, end, BLOCK: tl.constexpr):
    """begin, end without the padding before the first and after the last real key."""
    first, last = end, begin
    for j0 in range(begin, end, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        real = tl.load(key_mask + j, mask=j < end, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(real, j, end), 0))
        last = tl.maximum(last, tl.max(tl.where(real, j + 1, begin), 0))
    return tl.minimum(first, last), last


@triton.jit
def load_bias(bias_at, bias_n, bias_rows, r, lo, hi, mask):
    """The bias at distance r. Base 2."""
    step = tl.minimum(tl.maximum(r, lo), hi) - lo
    if bias_rows is not None:
        step = tl.load(bias_rows + step)
    return LOG2E * tl.load(bias_at + step * bias_n, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_shifts(x, shift, row_shift, h, e, mask, E: tl.constexpr):
    """x [rows, E] of the heads h plus those of two tables [H, E] that are given, rounded once."""
    if (shift is None) and (row_shift is None):
        return x
    else:
        total = x.to(tl.float32)
        at = h.to(tl.int64)[:, None] * E + e[None, :]
        if shift is not None:
            total += tl.load(shift + at, mask=mask, other=0.0).to(tl.float32)
        if row_shift is not None:
            total += tl.load(row_shift + at, mask=mask, other=0.0).to(tl.float32)
        return total.to(x.dtype)


@triton.jit
def make_rows(
    states_at, shift, row_shift, table, t_h, t_l, rows_at, valid, h, first_head, group, begin, end,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """states . table of a program's queries, for the distances begin .. end of the span, where the program itself reads them.
    SHARED: one table for all heads."""
    heads = group
    if SHARED:
        heads = 1
    for s0 in range(begin, end, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        for g in range(heads):
            acc = tl.zeros([BLOCK, valid.shape[0]], tl.float32)
            own = valid
            source = table + s.to(tl.int64)[:, None] * t_l
            if not SHARED:
                own = valid & (h == first_head + g)
                source += (first_head + g).to(tl.int64) * t_h
            for e0 in range(0, E, BLOCK_E):
                e = e0 + tl.arange(0, BLOCK_E)
                inside = valid[:, None] & (e[None, :] < E)
                x = tl.load(states_at[:, None] + e[None, :], mask=inside, other=0.0)
                x = add_shifts(x, shift, row_shift, h, e, inside, E)
                y = tl.load(source + e[None, :], mask=(s[:, None] < end) & (e[None, :] < E), other=0.0)
                acc = matmul(y.to(x.dtype), tl.trans(x), acc)
            tl.store(rows_at[None, :] + s[:, None], acc, mask=own[None, :] & (s[:, None] < end))


@triton.jit(
    do_not_specialize=[
        "bias_h", "bias_n", "bias_lo", "bias_hi", "rows_lo", "rows_hi", "key_mask_b", "extra_b", "extra_h", "extra_q", "extra_k",
        "heads", "group", "q_length", "k_length", "offset", "left", "right", "splits", "scale",
    ]
)  # fmt: skip
def decode(
    q, q_b, q_h, q_l, k, k_b, k_h, k_l, v, v_b, v_h, v_l,  # [B, heads, L, D], the last stride is 1
    out, out_b, out_h, out_l, lse, shares,  # [B, H, Lq, Dv]; float32 [B, H, Lq] or None; float32, see merge_shares, or None
    bias, bias_h, bias_n, bias_rows, bias_lo, bias_hi,  # [H or 1, n], int32 [bias_hi - bias_lo + 1] or None: one for each distance
    rows, rows_lo, rows_hi,  # float32 [B, H, Lq, n], n = rows_hi - rows_lo + 1; with a table [B, H, Lq, splits, n], to be made here
    states, s_b, s_h, s_l, table, t_h, t_l,  # [B, H, Lq, E], [H or 1, n, E]
    shift, row_shift,  # contiguous [H, D], added to q, and to q for the row term alone; or None
    slopes, scales, decay_q, decay_k,  # as in Terms
    starts,  # int32 [B] or None
    key_mask, key_mask_b,  # uint8 [B or 1, Lk]
    extra, extra_b, extra_h, extra_q, extra_k,  # as in Masks
    heads, group, q_length, k_length, offset, left, right, splits, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTRA_IS_BOOL: tl.constexpr, SCAN: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """SCAN: keys whose padding is read at a time before the loop. E to SHARED: as in make_rows."""
    count = group * q_length  # rows of a key head
    blocks = tl.cdiv(count, BLOCK_M)
    split = tl.program_id(0) % splits
    pid = tl.program_id(0) // splits
    m0 = pid % blocks * BLOCK_M
    bhk = pid // blocks
    kv_heads = heads // group
    b, hk = (bhk // kv_heads).to(tl.int64), bhk % kv_heads

    row = m0 + tl.arange(0, BLOCK_M)
    valid = row < count
    i, h = row // group, hk * group + row % group
    bh = b * heads + h
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_at = q + b * q_b + h.to(tl.int64)[:, None] * q_h + i.to(tl.int64)[:, None] * q_l + d[None, :]
    q_inside = valid[:, None] & (d[None, :] < D)
    q_tile = add_shifts(tl.load(q_at, mask=q_inside, other=0.0), shift, None, h, d, q_inside, D)
    k_ptr = k + b * k_b + hk.to(tl.int64) * k_h
    v_ptr = v + b * v_b + hk.to(tl.int64) * v_h

    terms = Terms(None, None, None, None, slopes, scales, decay_q, decay_k, None, None)
    masks = Masks(
        None, 0, None, None, None, 0, 0, None, None, 0, 0, extra, extra_b, extra_h, extra_q, extra_k, None, EXTRA_IS_BOOL, 1,
    )  # fmt: skip
    scale_row = row_scale(terms, bh, i, q_length, scale)
    if scales is not None:
        scale_row = scale_row[None, :]
    if starts is not None:
        offset += tl.load(starts + b)
    first, last = m0 // group, tl.minimum((m0 + BLOCK_M - 1) // group, q_length - 1)
    begin, end = key_share(first, last, q_length, k_length, left, right, split, splits, BLOCK_N)
    if key_mask is not None:
        begin, end = real_keys(key_mask + b * key_mask_b, begin, end, SCAN)

    # the span of all lookups, and what they add outside of it on both sides
    if bias is not None:
        lo, hi = bias_lo, bias_hi
        bias_at = bias + h * bias_h
        bias_left = load_bias(bias_at, bias_n, bias_rows, bias_lo, bias_lo, bias_hi, valid)
        bias_right = load_bias(bias_at, bias_n, bias_rows, bias_hi, bias_lo, bias_hi, valid)
    if rows is not None:
        if bias is not None:
            lo, hi = tl.minimum(lo, rows_lo), tl.maximum(hi, rows_hi)
        else:
            lo, hi = rows_lo, rows_hi
        n = rows_hi - rows_lo + 1
        row_at = (bh * q_length + i).to(tl.int64)
        has_left, has_right = valid, valid
        if table is not None:
            rows_at = rows + (row_at * splits + split) * n
            s0 = tl.minimum(tl.maximum(begin - last + offset, rows_lo), rows_hi) - rows_lo
            s1 = tl.minimum(tl.maximum(end - 1 - first + offset, rows_lo), rows_hi) - rows_lo + 1
            states_at = states + b * s_b + h.to(tl.int64) * s_h + i.to(tl.int64) * s_l
            make_rows(
                states_at, shift, row_shift, table, t_h, t_l, rows_at, valid, h, hk * group, group, s0, s1,
                E, BLOCK_E, BLOCK_R, SHARED,
            )  # fmt: skip
            tl.debug_barrier()  # other threads of this program read what one has written
            zero = tl.zeros_like(row)
            has_left, has_right = valid & (s0 + zero == 0), valid & (s1 + zero == n)
        else:
            rows_at = rows + row_at * n
        rows_left = tl.load(rows_at, mask=has_left, other=0.0)
        rows_right = tl.load(rows_at + (n - 1), mask=has_right, other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_DV, BLOCK_M], tl.float32)
    for t in range(tl.cdiv(end - begin, BLOCK_N)):
        n0 = begin + t * BLOCK_N
        j = n0 + tl.arange(0, BLOCK_N)
        inside = j < end
        if key_mask is not None:  # what lies in padding may be anything, a NaN included
            inside = inside & (tl.load(key_mask + b * key_mask_b + j, mask=inside, other=0) != 0)
        k_tile = load_rows(k_ptr, k_l, n0, inside, d, D)
        qk = matmul(k_tile, tl.trans(q_tile))
        r = j[:, None] - i[None, :] + offset
        if (bias is None) and (rows is None):
            qk = qk * scale_row
        else:
            on_left = n0 + BLOCK_N - 1 - first + offset <= lo
            if on_left | (n0 - last + offset >= hi):
                if rows is not None:
                    qk += tl.where(on_left, rows_left, rows_right)[None, :]
                qk = qk * scale_row
                if bias is not None:
                    qk += tl.where(on_left, bias_left, bias_right)[None, :]
            else:
                pair = inside[:, None] & valid[None, :]
                if rows is not None:
                    step = tl.minimum(tl.maximum(r, rows_lo), rows_hi) - rows_lo
                    qk += tl.load(rows_at[None, :] + step, mask=pair, other=0.0)
                qk = qk * scale_row
                if bias is not None:
                    qk += load_bias(bias_at[None, :], bias_n, bias_rows, r, bias_lo, bias_hi, pair)
        qk = add_unscaled_terms(
            qk, terms, masks, b, h[None, :], bh[None, :], i[None, :], j[:, None], r, q_length, k_length
        )  # fmt: skip
        mask = visible(masks, b, h[None, :], i[None, :], j[:, None], q_length, k_length, left, right)
        qk = tl.where(mask & inside[:, None], qk, float("-inf"))
        p, alpha, m_i, l_i = online_softmax(qk, m_i, l_i, 0)
        v_tile = load_rows(v_ptr, v_l, n0, inside, dv, DV)
        acc = matmul(tl.trans(v_tile), p.to(v_tile.dtype), acc * alpha[None, :])

    is_empty = l_i == 0.0
    inside = valid[None, :] & (dv[:, None] < DV)
    at = (bh * q_length + i).to(tl.int64)
    if shares is not None:
        # maximum and sum apart: their log-sum-exp would be rounded to the size of the scores
        sums = shares + tl.num_programs(0).to(tl.int64) // (splits * blocks) * count * splits * DV
        at_share = at * splits + split
        tl.store(shares + at_share[None, :] * DV + dv[:, None], acc, mask=inside)
        tl.store(sums + at_share * 2, tl.where(is_empty, float("-inf"), m_i), mask=valid)
        tl.store(sums + at_share * 2 + 1, l_i, mask=valid)
    else:
        acc = acc / tl.where(is_empty, 1.0, l_i)[None, :]
        out_at = out + b * out_b + h.to(tl.int64) * out_h + i.to(tl.int64) * out_l
        tl.store(out_at[None, :] + dv[:, None], acc.to(out.dtype.element_ty), mask=inside)
        if lse is not None:
            tl.store(lse + at, tl.where(is_empty, float("-inf"), (m_i + tl.log2(l_i)) * LN2), mask=valid)


@triton.jit(do_not_specialize=["heads", "q_length", "splits"])
def merge_shares(
    shares, out, out_b, out_h, out_l, lse, heads, q_length, splits, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program for each query and head. shares: float32 [rows, splits, Dv], unnormalised, and behind them [rows, splits, 2]:
    maximum and sum."""
    row = tl.program_id(0).to(tl.int64)
    sums = shares + tl.num_programs(0).to(tl.int64) * splits * DV
    dv = tl.arange(0, BLOCK_DV)
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for s0 in range(0, splits, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        at = row * splits + s
        m_s = tl.load(sums + at * 2, mask=s < splits, other=float("-inf"))
        l_s = tl.load(sums + at * 2 + 1, mask=s < splits, other=0.0)
        part = tl.load(
            shares + at[:, None] * DV + dv[None, :], mask=(s < splits)[:, None] & (dv[None, :] < DV), other=0.0
        )
        m_new = tl.maximum(m, tl.max(m_s, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(m_s - base)
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(weight * l_s, 0)
        acc = acc * alpha + tl.sum(weight[:, None] * part, 0)
        m = m_new
    is_empty = l == 0.0
    acc = acc / tl.where(is_empty, 1.0, l)
    out += row // (heads * q_length) * out_b + row // q_length % heads * out_h + row % q_length * out_l
    tl.store(out + dv, acc.to(out.dtype.element_ty), mask=dv < DV)
    if lse is not None:
        tl.store(lse + row, tl.where(is_empty, float("-inf"), (m + tl.log2(l)) * LN2))


@triton.jit(do_not_specialize=["batch", "heads", "q_length", "n"])
def query_rows(
    states, s_b, s_h, s_l, shift, row_shift, table, t_h, t_l, out, batch, heads, q_length, n,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """out [B, H, Lq, n] = (states [B, H, Lq, E] + shift + row_shift [H, E]) . table [H or 1, n, E]. SHARED: one table for all heads,
    whose queries are rows of one tile."""
    blocks = tl.cdiv(n, BLOCK_N)
    n0 = tl.program_id(0) % blocks * BLOCK_N
    pid = tl.program_id(0) // blocks
    if SHARED:
        row = pid * BLOCK_M + tl.arange(0, BLOCK_M)
        i, h, b = row % q_length, row // q_length % heads, row // q_length // heads
    else:
        row = pid // heads * BLOCK_M + tl.arange(0, BLOCK_M)
        i, h, b = row % q_length, pid % heads + tl.zeros_like(row), row // q_length
        table += (pid % heads).to(tl.int64) * t_h
    valid = b < batch
    j = n0 + tl.arange(0, BLOCK_N)
    source = states + b.to(tl.int64) * s_b + h.to(tl.int64) * s_h + i.to(tl.int64) * s_l
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        inside = valid[:, None] & (e[None, :] < E)
        x = tl.load(source[:, None] + e[None, :], mask=inside, other=0.0)
        x = add_shifts(x, shift, row_shift, h, e, inside, E)
        y = tl.load(table + j[:, None] * t_l + e[None, :], mask=(j[:, None] < n) & (e[None, :] < E), other=0.0)
        acc = matmul(x, tl.trans(y.to(x.dtype)), acc)
    at = ((b * heads + h).to(tl.int64) * q_length + i)[:, None] * n + j[None, :]
    tl.store(out + at, acc, mask=valid[:, None] & (j[None, :] < n))
