"""Positions other than 0, 1, 2, ...: a grid of patches, a clip of frames, text with images, random gaps.

All are int64 tensors for `Positions`, with one row: [1, L, axes]. Rows of the same length are joined with torch.cat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...core.options import require_int


def grid_positions(
    rows: int, columns: int, *, prefix: int = 0, prefix_at: int = 0, centred: bool = False, merge: int = 1, device=None
) -> Tensor:
    """(row, column) of every patch of an image, row by row: [1, prefix + rows · columns, 2].

    prefix     tokens before the patches (class and register tokens), all at `prefix_at` on both axes
    centred    2·row + 1 - rows, 2·column + 1 - columns: patch centres in half steps (DINOv3)
    merge      patches in blocks of merge × merge, block by block (Qwen2-VL's vision tower)

    Raises ValueError for a grid without whole blocks of `merge`.

        >>> posenc.rope.grid_positions(1, 3)[0]
        tensor([[0, 0],
                [0, 1],
                [0, 2]])
    """
    _sizes(rows=rows, columns=columns, merge=merge)
    if rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows} × {columns} has no whole blocks of {merge} × {merge}")
    r, c = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    if centred:
        r, c = 2 * r + 1 - rows, 2 * c + 1 - columns
    grid = torch.stack((r, c), dim=-1)
    grid = grid.reshape(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    return torch.cat((grid.new_full((prefix, 2), prefix_at), grid))[None]


def clip_positions(frames: int, rows: int, columns: int, *, start: int = 0, step: float = 1.0, device=None) -> Tensor:
    """(time, row, column) of every patch of a clip, frame by frame: [1, frames · rows · columns, 3].

    start   added on all axes (where the clip begins in a text)
    step    time from frame to frame; times are rounded down

    Raises ValueError for negative sizes.

        >>> posenc.rope.clip_positions(2, 1, 2)[0]
        tensor([[0, 0, 0],
                [0, 0, 1],
                [1, 0, 0],
                [1, 0, 1]])
    """
    _sizes(frames=frames, rows=rows, columns=columns)
    times = torch.tensor([int(frame * step) for frame in range(frames)], device=device)
    axes = torch.meshgrid(times, torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    return torch.stack(axes, dim=-1).reshape(1, -1, 3) + start


def mixed_positions(
    parts: Iterable[int | Sequence[int]], *, after: str = "largest", step: float | Sequence[float] = 1.0, device=None
) -> Tensor:
    """(time, row, column) of text with images and clips among it, for M-RoPE: [1, L, 3].

        mixed_positions([5, (4, 6), 3])          5 words, an image of 4 × 6 (merged) patches, 3 words
        mixed_positions([2, (3, 4, 6)])          2 words, a clip of 3 frames of 4 × 6

    Words have the same position on all axes. Text after an image continues
        after="largest"   behind the largest position used so far (Qwen2-VL's paper, vLLM)
        after="size"      max(rows, columns) behind the image's start (Hugging Face); the same for single images,
                          different for clips with more frames than rows and columns
    step is the time from frame to frame, one for all clips or one for each; times are rounded down. (Qwen2.5-VL:
    tokens per second × seconds per frame. Qwen3-VL writes the time as words and each frame as an image.)

    Raises ValueError for parts that are neither a length nor sizes of an image.

        >>> posenc.rope.mixed_positions([1, (1, 2), 1])[0]
        tensor([[0, 0, 0],
                [1, 1, 1],
                [1, 1, 2],
                [3, 3, 3]])
    """
    parts = list(parts)
    clips = sum(not isinstance(part, int) and len(part) == 3 for part in parts)
    steps = [float(step)] * clips if isinstance(step, (int, float)) else [float(each) for each in step]
    if len(steps) != clips:
        raise ValueError(f"step has {len(steps)} numbers for {clips} clips; give one for all, or one for each")
    remaining = iter(steps)
    if after not in ("largest", "size"):
        raise ValueError(f"after={after!r} is unknown; use 'largest' or 'size'")
    pieces, start = [], 0
    for part in parts:
        if isinstance(part, int):
            _sizes(words=part)
            pieces.append((torch.arange(part, device=device) + start)[None, :, None].expand(-1, -1, 3))
            start += part
            continue
        sizes = (1, *part) if len(part) == 2 else tuple(part)
        if len(sizes) != 3:
            raise ValueError(f"a part is a number of words, (rows, columns) or (frames, rows, columns), got {part}")
        each = next(remaining) if len(part) == 3 else 1.0
        pieces.append(clip_positions(*sizes, start=start, step=each, device=device))
        grown = max(sizes[1:])
        start += grown if after == "size" else max(grown, int((sizes[0] - 1) * each) + 1)
    return torch.cat(pieces, dim=1) if pieces else torch.zeros(1, 0, 3, dtype=torch.int64, device=device)


def random_positions(
    length: int, max_length: int, *, batch: int | None = None, generator: torch.Generator | None = None, device=None
) -> Tensor:
    """`length` distinct positions of [0, max_length), sorted, drawn uniformly: [L], or [B, L] with a draw for each row.

    Randomised positions (Ruoss et al. 2023, arXiv:2305.16843): train short sequences with the positions of long ones.

    Raises ValueError where the positions are fewer than the tokens.

        >>> posenc.rope.random_positions(5, 100).shape
        torch.Size([5])
    """
    _sizes(length=length, max_length=max_length)
    if length > max_length:
        raise ValueError(f"{length} distinct positions do not fit below {max_length}; give max_length >= {length}")
    rows = 1 if batch is None else batch
    source = generator.device if generator is not None else device
    drawn = torch.rand(rows, max_length, generator=generator, device=source).argsort(-1)[:, :length].sort(-1).values
    drawn = drawn.to(device) if device is not None else drawn
    return drawn[0] if batch is None else drawn


def _sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        require_int(name, size)
