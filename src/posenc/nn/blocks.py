"""Attention of images and speech with a bias that is made a block at a time on a CPU, forward and backward.

    queries  ▒▒▒▒ ▒▒▒▒        a block: some images times some queries, their bias [b, H, rows, Lk] at most 4 MiB; PyTorch's
             ▒▒▒▒ ....        attention runs it while it is still in the processor's cache

The originals write the bias of all queries, [B, H, Lq, Lk], and read it again, or keep all probabilities for the gradients.
Here only the compact form is kept (tables, gates, one number for each query and image row), and the backward pass recomputes
the blocks. Elsewhere PyTorch's attention takes a window's bias whole, and terms by image row and column as channels (`attend_axes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..core.memo import Memo, may_keep
from ..core.plan import Plan
from ..encodings.grid.decomposed import resized
from ..functional import attend

NAME = "blocks"
"""What `report` says of layers that run here on a CPU."""
NUMBERS = 1 << 20
"""Of one block's bias, and of a bias that is kept: 4 MiB of float32."""
MakeBias = Callable[..., Tensor]
"""(images, rows, *tensors) -> [b or 1, H or 1, rows, Lk], by differentiable operations; images and rows are slices. The first
`by_query` tensors, [B, H, Lq, ..], come cut to the block."""


def is_auto(module: Any) -> bool:
    """Whether no engine is named for this module."""
    return module.__dict__.get("posenc_engine", "auto") == "auto"


def on_cpu(x: Tensor) -> bool:
    return x.is_cpu


def in_blocks(module: Any, q: Tensor) -> bool:
    """Whether `run` runs this call in blocks."""
    return on_cpu(q) and is_auto(module)


def run(
    module: Any, q: Tensor, k: Tensor, v: Tensor, make: MakeBias, tensors: tuple[Tensor, ...], plan: Callable[[], Plan],
    options: Callable[[], dict[str, Any]], *, scale: float, dropout: float = 0.0, plain_gradients: bool = False, by_query: int = 0,
) -> Tensor:  # fmt: skip
    """[B, H, L, D] -> [B, L, H * D]: in blocks on a CPU, elsewhere and with a named engine by `attend`.

    `make` and `tensors` are the whole bias, masks included; so are `plan` and `options`.
    """
    engine = module.__dict__.get("posenc_engine", "auto")
    dropout = dropout if module.training else 0.0
    if in_blocks(module, q):
        out = attend_blocks(
            q, k, v, make, tensors, scale=scale, dropout=dropout, plain_gradients=plain_gradients, by_query=by_query
        )
    else:
        out = attend(q, k, v, plan(), dropout=dropout, engine=engine, **options())
    return out.transpose(1, 2).flatten(2)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, make: MakeBias, tensors: tuple[Tensor, ...], *, scale: float, dropout: float = 0.0,
    plain_gradients: bool = False, by_query: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(scale q·k + bias) v, [B, H, L, D]; in blocks on a CPU only.

    plain_gradients: with gradients the plain formula, which keeps the probabilities as the originals do. It is faster than blocks
    that are computed twice where all images share one bias, or tokens are few.
    """
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tensors))
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    is_whole = is_traced or dropout > 0.0 or not on_cpu(q)
    if is_whole or (wants_gradient and plain_gradients):
        bias = make(slice(0, q.shape[0]), slice(0, q.shape[2]), *tensors).to(q.dtype)
        if is_whole or q.dtype not in (torch.float32, torch.float64):
            return scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=scale)
        return _plain(q, k, v, bias, scale)
    if wants_gradient:
        return _Blocks.apply(q, k, v, make, scale, by_query, *tensors)
    return _forward(q, k, v, make, tensors, scale, by_query)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    return ((q * scale) @ k.transpose(-1, -2) + bias).softmax(-1) @ v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, make: MakeBias, tensors: tuple[Tensor, ...], scale: float, by_query: int
) -> Tensor:
    blocks = list(cut(q.shape, k.shape[2]))
    if len(blocks) == 1:
        return scaled_dot_product_attention(q, k, v, make(*blocks[0], *tensors).to(q.dtype), scale=scale)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    for images, rows in blocks:
        parts = [x[images, :, rows] for x in tensors[:by_query]]
        bias = make(images, rows, *parts, *tensors[by_query:]).to(q.dtype)
        out[images, :, rows] = scaled_dot_product_attention(q[images, :, rows], k[images], v[images], bias, scale=scale)
    return out


def cut(shape: torch.Size, k_length: int) -> Iterator[tuple[slice, slice]]:
    """(images, rows) of each block: whole images, or rows of one. shape: of the queries, [B, H, L, D]."""
    batch, heads, q_length, _ = shape
    image = max(1, heads * q_length * k_length)
    if image <= NUMBERS:
        step = NUMBERS // image
        for first in range(0, batch, step):
            yield slice(first, min(first + step, batch)), slice(0, q_length)
        return
    rows = max(1, NUMBERS // (heads * k_length))
    rows = -(-q_length // -(-q_length // rows))  # blocks of about the same size
    for one in range(batch):
        for first in range(0, q_length, rows):
            yield slice(one, one + 1), slice(first, min(first + rows, q_length))


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, make, scale, by_query, *tensors):
        out = _forward(q, k, v, make, tensors, scale, by_query)
        ctx.save_for_backward(q, k, v, out, *tensors)
        ctx.make, ctx.scale, ctx.by_query = make, scale, by_query
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, *given = ctx.saved_tensors
        needs = ctx.needs_input_grad[6:]
        if torch.is_grad_enabled():  # create_graph: the gradients are differentiated again
            bias = ctx.make(slice(0, q.shape[0]), slice(0, q.shape[2]), *given)
            all_needs = (*ctx.needs_input_grad[:3], *needs)
            wanted = [x for x, need in zip((q, k, v, *given), all_needs, strict=True) if need]
            found = iter(torch.autograd.grad(_plain(q, k, v, bias, ctx.scale), wanted, d_out, create_graph=True))
            d_q, d_k, d_v, *others = [next(found) if need else None for need in all_needs]
            return (d_q, d_k, d_v, None, None, None, *others)
        whole = [x.detach().requires_grad_(need) for x, need in zip(given, needs, strict=True)][ctx.by_query :]
        d_parts = [torch.empty_like(x) if need else None for x, need in zip(given[: ctx.by_query], needs)]
        precision = torch.promote_types(q.dtype, torch.float32)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for images, rows in cut(q.shape, k.shape[2]):
            q_i, k_i, v_i, d_i = q[images, :, rows], k[images], v[images], d_out[images, :, rows]
            # parts are separate leaves: the gradient of a slice would be as large as the whole
            parts = [x[images, :, rows].detach().requires_grad_(need) for x, need in zip(given[: ctx.by_query], needs)]
            with torch.enable_grad():
                bias = ctx.make(images, rows, *parts, *whole)
            p = (q_i @ k_i.transpose(-1, -2)).to(precision).mul_(ctx.scale).add_(bias.detach()).softmax(-1)
            d_v[images] += p.to(v.dtype).transpose(-1, -2) @ d_i
            delta = (d_i * out[images, :, rows]).to(precision).sum(-1, keepdim=True)
            d_s = (d_i @ v_i.transpose(-1, -2)).to(precision).sub_(delta).mul_(p)
            if bias.requires_grad:
                torch.autograd.backward(bias, _sum_to(d_s, bias).to(bias.dtype))
            for part, gradient in zip(parts, d_parts, strict=True):
                if gradient is not None:
                    gradient[images, :, rows] = part.grad
            d_s = d_s.mul_(ctx.scale).to(q.dtype)
            d_q[images, :, rows] = d_s @ k_i
            d_k[images] += d_s.transpose(-1, -2) @ q_i
        return (d_q, d_k, d_v, None, None, None, *d_parts, *(x.grad for x in whole))


def _sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    axes = [axis for axis in range(4) if like.shape[axis] == 1 != gradient.shape[axis]]
    return gradient.sum(axes, keepdim=True) if axes else gradient


# ---- windows and images ----------------------------------------------------------------------------------------------
def add_window_mask(images: slice, rows: slice, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """A window's bias [1, H, L, L] and the mask of the windows of an image, [windows, L, L]; `images` are windows."""
    bias = bias[:, :, rows]
    if mask is None:
        return bias
    if not on_cpu(bias):  # all windows of some images: no index to make
        return (bias + mask[:, None, rows])[None].expand(images.stop // len(mask), -1, -1, -1, -1).flatten(0, 1)
    return bias + mask[torch.arange(images.start, images.stop, device=mask.device) % len(mask), None, rows]


def rows_of_pairs(table: Tensor, size: int) -> Tensor:
    """[2 size - 1, d], query minus key -> [size, size, d]; a table of another size is interpolated linearly, as SAM does."""
    table = resized(table, size)
    at = torch.arange(size, device=table.device)
    return table.index_select(0, (at[:, None] - at + size - 1).flatten()).view(size, size, -1)


def decompose(q: Tensor, grid: tuple[int, int], by_row: Tensor, by_column: Tensor) -> tuple[Tensor, Tensor]:
    """q·R of each image row and of each column, [B, H, L, rows] and [B, H, L, columns]."""
    image = q.unflatten(2, grid)
    rows = torch.einsum("bnhwc,hkc->bnhwk", image, rows_of_pairs(by_row, grid[0]))
    columns = torch.einsum("bnhwc,wkc->bnhwk", image, rows_of_pairs(by_column, grid[1]))
    return rows.flatten(2, 3), columns.flatten(2, 3)


def add_axes(images: slice, rows: slice, by_row: Tensor, by_column: Tensor) -> Tensor:
    return (by_row[..., :, None] + by_column[..., None, :]).flatten(3)


WIDEST = 256
"""Channels of a head that PyTorch's fused attention takes on a GPU."""


def fits_channels(size: int, grid: tuple[int, int]) -> bool:
    """Whether heads of `size` channels have room for one more for each image row and column."""
    return size + sum(grid) <= WIDEST


def attend_axes(
    q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], by_row: Tensor, by_column: Tensor, *, scale: float,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """softmax(scale q·k + q·R_rows + q·R_columns) v, [B, H, L, D]; by_row and by_column [2 size - 1, D], query minus key.

    In blocks on a CPU. Elsewhere a query has a channel more for each image row and column, and a key selects its own:

        q' = [q,  q·R_rows[row_i - 0], q·R_rows[row_i - 1], ..   q·R_columns[column_i - 0], ..]
        k' = [k,      [row_j = 0],         [row_j = 1],     ..       [column_j = 0],        ..]

    so that FlashAttention runs without a bias, [B, H, L, L], and without its gradient.
    """
    size, (height, width) = q.shape[3], grid
    if on_cpu(q):
        terms = decompose(q, grid, by_row, by_column)
        return attend_blocks(q, k, v, add_axes, terms, scale=scale, dropout=dropout, by_query=2)
    if not fits_channels(size, grid):
        bias = add_axes(slice(0), slice(0), *decompose(q, grid, by_row, by_column))
        return scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout, scale=scale)
    rows, columns = decompose(q, grid, by_row / scale, by_column / scale)
    rest = -(size + height + width) % 8  # kernels read 16 bytes at a time; the keys are zero here
    wide = torch.cat((q, rows, columns, q[..., :rest]), 3)
    selected = _one_hot(grid, rest, k.dtype, k.device).expand(*k.shape[:2], -1, -1)
    key = torch.cat((k, selected), 3)
    value = nn.functional.pad(v, (0, key.shape[3] - size))
    return scaled_dot_product_attention(wide, key, value, dropout_p=dropout, scale=scale)[..., :size]


_grids = Memo(16, 1 << 22)


def _one_hot(grid: tuple[int, int], rest: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[L, rows + columns + rest]: 1 in the image row and in the column of each token."""

    def make() -> Tensor:
        height, width = grid
        rows = torch.eye(height, dtype=dtype, device=device).repeat_interleave(width, 0)
        columns = torch.eye(width, width + rest, dtype=dtype, device=device).repeat(height, 1)
        return torch.cat((rows, columns), 1)

    return _grids.find_or_make((grid, rest, dtype, device), make, Tensor.numel) if may_keep(device) else make()


# ---- tables ----------------------------------------------------------------------------------------------------------
def read_table(table: Tensor, index: Tensor) -> Tensor:
    """table [n, H], index int64 [rows, Lk] -> [1, H, rows, Lk]. `table[index]` takes five times as long, and its gradient more."""
    return table.t().contiguous().index_select(1, index.reshape(-1)).view(1, table.shape[1], *index.shape)


_kept: WeakKeyDictionary[nn.Module, tuple[tuple[Tensor, ...], Any, Tensor, int]] = WeakKeyDictionary()
"""Module -> copies of the tables, the key, the bias and its version: an entry that was changed in place is not used."""


def keep(module: nn.Module, key: Any, tables: tuple[Tensor, ...], make: Callable[[], Tensor]) -> Tensor:
    """make(), or on a CPU what it returned last for this module, if no gradient is wanted and the tables' numbers are the same;
    elsewhere comparing them would be a synchronisation.

    A layer keeps one bias of at most 4 MiB, with copies of the tables: no way of changing a parameter makes it stale.
    """
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tables)
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if wants_gradient or is_traced or not all(x.is_cpu for x in tables):
        return make()
    found = _kept.get(module)
    if found is not None and found[1] == key and found[2]._version == found[3]:
        if all(_same(a, b) for a, b in zip(found[0], tables, strict=True)):
            return found[2]
    with torch.inference_mode(False), torch.no_grad():
        made = make()
        if made.numel() <= NUMBERS:
            _kept[module] = tuple(x.detach().clone() for x in tables), key, made, made._version
    return made


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
