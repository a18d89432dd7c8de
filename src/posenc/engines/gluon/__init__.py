"""Kernels for Hopper GPUs, written in Gluon (Triton's own lower level): a path of the triton engine.

    prepare, kernel, launch         the forward pass: which tiles a block visits, the padded table; producer and consumers; buffers, descriptors
    skew, window, window_launch     the forward pass with a content term of the queries
    rolling, rolling_launch         the same where the term has a row for every visible distance
    backward, backward_prepare, backward_launch     the backward pass, with five products; what runs before and after it
    content_backward, content_launch     the same with content terms
    rolling_backward, rolling_backward_keys, rolling_prepare, rolling_backward_launch     the same where the term has a row for every visible distance

`refuse` and `refuse_backward` say where they do not apply; the triton engine's own kernels run there. Either backward pass needs
nothing but out and the log-sum-exp. Gluon promises nothing from one Triton release to the next, so only tested ones are used.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from ..triton.device import capability

if TYPE_CHECKING:
    from ..lowering import Facts
    from ..triton.arguments import Inputs, Numbers

TESTED = ("3.6",)
DTYPES = (torch.bfloat16, torch.float16)
SIZES = (64, 128)
SHORTEST = 512  # queries and keys
FEWEST = (
    128  # blocks of 192 queries: with fewer, the smaller tiles of the triton engine's kernels fill the device better
)
# queries and keys without content terms, and blocks; 64 x 12 x 128 tokens in 30 µs against 52, 16 x 12 x 128 (192 blocks) in 15 against 17.5
SHORTEST_PLAIN, FEWEST_PLAIN = 64, 256
SHORTEST_CONTENT = 2048  # keys: of shorter texts most tiles are near ones, and the other kernel's are smaller
SMALLEST = 2.0**-40
SHORTEST_BACKWARD = 2048  # as measured
SHORTEST_CONTENT_BACKWARD = 512  # as measured
WIDE_OF_128 = False  # content terms over wide spans, heads of 128, in the backward pass: compared on a card, not timed
MOST_SUMS = 1 << 27  # float32 numbers of content_backward.py's outer
MOST = 1 << 20  # blocks of keys in the backward pass: their order is made on the host
WIDEST_GRADIENT = 2048  # distances of a bias in the backward pass: each program keeps 16 rows of them
READS = {
    "q", "k", "v", "bias", "slopes", "starts", "key_mask", "key_bounds", "doc_q", "doc_k", "doc_q_keys", "doc_k_queries",
}  # fmt: skip


def _version() -> str:
    try:
        found = re.match(r"\d+\.\d+", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        found = None
    return found[0] if found else "none"


VERSION = _version()
_failures: list[str] = []


def give_up(error: Exception) -> None:
    """After an error of the compiler or the driver: the triton engine's kernels run from now on."""
    _failures.append(f"{type(error).__name__}: {error}")
    warnings.warn(
        f"the backward kernel for Hopper cannot run here, and posenc takes the slower pair of kernels: {_failures[0]}",
        stacklevel=2,
    )


@contextmanager
def attempt() -> Iterator[None]:
    """Gluon gives no guarantees: after whatever its compiler raises in this context, what follows it runs instead."""
    try:
        yield
    except Exception as error:
        give_up(error)


def refuse(x: Inputs, num: Numbers, scale: float, dropout: float) -> str | None:
    """Why the kernel does not run this call, or None."""
    return refuse_any_size(x, num, scale, dropout) or refuse_plain_size(x)


def refuse_any_size(x: Inputs, num: Numbers, scale: float, dropout: float) -> str | None:
    """Why the kernel would not run this call whatever its sizes, or None."""
    return refuse_device(x.q.device) or refuse_call(x, num, scale, dropout)


def refuse_plain_size(x: Inputs) -> str | None:
    if min(x.q.shape[2], x.k.shape[2]) >= SHORTEST:
        return refuse_size(x)
    if x.bias is None and x.slopes is None:
        return f"without terms it took 1.05 to 1.10 of the other kernel's time before {SHORTEST} tokens"
    return refuse_size(x, SHORTEST_PLAIN, FEWEST_PLAIN)


def refuse_size(x: Inputs, shortest: int | None = None, fewest: int | None = None) -> str | None:
    """Why the triton engine's own kernels are faster for texts of this size, or None; by default those with content terms."""
    shortest, fewest = SHORTEST if shortest is None else shortest, FEWEST if fewest is None else fewest
    (batch, heads, q_length, _), k_length = x.q.shape, x.k.shape[2]
    if min(q_length, k_length) < shortest:
        return f"it needs {shortest} queries and keys, got {q_length} and {k_length}"
    blocks = batch * heads * -(-q_length // 192)
    if blocks < fewest:
        return f"it needs {fewest} blocks of 192 queries to fill a device, got {blocks}"
    return None


def refuse_window(x: Inputs, num: Numbers, scale: float, dropout: float) -> str | None:
    """Why the kernel with a content term does not run this call, or None. A bias must have the term's distances: x without it, then."""
    if x.table is None:
        return "it needs a content term of the queries"
    reads = READS - {"bias", "slopes"} | {"table", "states"}
    if x.key_table is not None:
        if x.starts is not None or (-num.cols_hi, -num.cols_lo) != (num.rows_lo, num.rows_hi):
            return "a content term of the keys must have the distances of the queries' term, and no start for each row"
        reads = reads | {"key_table"}
    reason = refuse_device(x.q.device) or refuse_call(x, num, scale, dropout, reads) or refuse_size(x)
    reason = reason or refuse_slower(x, num)
    if reason is not None:
        return reason
    from .window_launch import choose_tile

    if x.q.shape[3] == 64 and not num.wide and num.right < 0 and x.k.shape[2] < SHORTEST_CONTENT:
        return f"a term over few distances that is not causal took 1.03 to 1.27 of the other kernel's time before {SHORTEST_CONTENT} keys"
    width = x.table.shape[2]
    if width % 16 or choose_tile(x.q.shape[3], width, x.states is not None) is None:
        return f"rows of {width} channels do not fit in shared memory beside heads of {x.q.shape[3]}"
    return None


def refuse_rolling(x: Inputs, num: Numbers, scale: float, dropout: float) -> str | None:
    """Why the kernel with a content term over every distance does not run this call, or None. x as for refuse_window."""
    if x.table is None or x.states is not None:
        return "it needs a content term of the queries themselves"
    if x.q.shape[3] != 64:
        return f"head sizes are 64, got {x.q.shape[3]}"
    if x.starts is not None or not spans_all(x, num):
        return "the table ends within the text"
    reads = READS - {"bias", "slopes", "starts"} | {"table"}
    reason = refuse_device(x.q.device) or refuse_call(x, num, scale, dropout, reads) or refuse_size(x)
    return reason or refuse_slower(x, num)


def refuse_rolling_backward(x: Inputs, num: Numbers, scale: float, dropout: float, do: torch.Tensor) -> str | None:
    """Why the backward kernels with a content term over every distance do not run this call, or None. x as for refuse_window."""
    if _failures:
        return f"it failed before: {_failures[0]}"
    if x.table is not None and x.table.shape[0] != x.q.shape[1]:
        return "it needs a table for each head"
    if bad_strides(do):
        return "the copy engine cannot read the output's gradient"
    return refuse_rolling(x, num, scale, dropout)


def spans_all(x: Inputs, num: Numbers) -> bool:
    """Whether the content term has a row of its own for every visible distance."""
    first, last = visible_distances(x, num)
    return num.rows_lo <= first and last <= num.rows_hi


def visible_distances(x: Inputs, num: Numbers) -> tuple[int, int]:
    """The first and the last distance that limits leave visible, without a start for each row."""
    q_length = x.q.shape[2]
    low, high = visible_range(0, q_length, q_length, x.k.shape[2], num.left, num.right)
    return low + num.offset, high + num.offset


def visible_range(first: int, last: int, q_length: int, k_length: int, left: int, right: int) -> tuple[int, int]:
    """The smallest and the largest j - i that limits (-1: none) leave visible to the queries i = first .. last - 1."""
    low, high, diff = 1 - last, k_length - 1 - first, k_length - q_length
    return low if left < 0 else max(low, diff - left), high if right < 0 else min(high, diff + right)


def refuse_slower(x: Inputs, num: Numbers) -> str | None:
    """Why the triton engine's own kernel with a content term is faster, or None."""
    if x.doc_q is not None and num.right < 0:
        return "documents that are not causal took up to 1.26 of the other kernel's time"
    return None


def refuse_device(device: torch.device) -> str | None:
    if VERSION not in TESTED:
        return f"it is tested with Triton {', '.join(TESTED)}, found {VERSION}"
    if device.type != "cuda" or torch.version.hip is not None or capability(device) != (9, 0):
        return "it needs a GPU of compute capability 9.0"
    return None


def refuse_call(x: Inputs, num: Numbers, scale: float, dropout: float, reads: set[str] = READS) -> str | None:
    q, k, v = x.q, x.k, x.v
    if q.dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, not {q.dtype}"
    if q.shape[3] not in SIZES or v.shape[3] != q.shape[3]:
        return f"head sizes are {' or '.join(map(str, SIZES))}, the same for keys and values, got {q.shape[3]} and {v.shape[3]}"
    extra = [name for name, tensor in zip(x._fields, x, strict=True) if tensor is not None and name not in reads]
    if extra:
        return f"it knows {', '.join(sorted(reads))}, not {', '.join(extra)}"
    if dropout > 0.0:
        return "it has no dropout"
    if scale < SMALLEST:
        return f"the bias is divided by the scale, which must be at least {SMALLEST}, got {scale}"
    if any(bad_strides(tensor) for tensor in (q, k, v)):
        return "the copy engine needs rows that begin at multiples of 16 bytes and strides above zero"
    return None


def refuse_backward(x: Inputs, num: Numbers, scale: float, dropout: float, do: torch.Tensor) -> str | None:
    """Why the backward kernel does not run this call, or None."""
    reason = refuse_any_backward(x, do) or refuse_size(x, SHORTEST_BACKWARD)
    if reason is not None:
        return reason
    if num.bias_hi - num.bias_lo > WIDEST_GRADIENT:
        return f"the bias spans more than {WIDEST_GRADIENT} distances"
    return refuse_any_size(x, num, scale, dropout)


def refuse_content_backward(x: Inputs, num: Numbers, scale: float, dropout: float, do: torch.Tensor) -> str | None:
    """Why the backward kernel with content terms does not run this call, or None. x without a bias that is part of the row term."""
    if x.table is None and x.key_table is None and x.value is None:
        return "it needs a content term"
    reads = READS - {"bias", "slopes", "starts"} | {"table", "states", "key_table", "value"}
    reason = refuse_any_backward(x, do) or refuse_device(x.q.device)
    reason = reason or refuse_call(x, num, scale, dropout, reads) or refuse_size(x, SHORTEST_CONTENT_BACKWARD)
    if reason is not None:
        return reason
    from .content_launch import holds_near_tiles, is_one_sided

    if x.table is not None and blocks_of_keys(x) * x.q.shape[1] // x.k.shape[1] * x.q.shape[2] > MOST_SUMS:
        return f"sums for each block of 128 keys and each query would be more than {MOST_SUMS}"
    if num.wide and x.q.shape[3] == 128 and not WIDE_OF_128:
        return "heads of 128 over wide spans were compared, but not timed"
    if num.queries:
        return "the row term has too many distances for one band in memory"
    if num.wide and not holds_near_tiles(x, num):
        return "tiles reach beyond the bands (reads_bands)"
    if x.table is not None and not is_one_sided(x, num):
        return "a block of 128 keys may lie beyond both ends of the row term's span"
    return None


def reads_bands(facts: Facts) -> bool:
    """Whether a backward pass by the kernel with content terms may follow, as far as is known before there are tensors: wider bands are for it alone."""
    return (
        facts.gradient and not facts.dropout and facts.dtype in DTYPES and facts.scale == "number"
        and (facts.head_dim == 64 or (facts.head_dim == 128 and WIDE_OF_128))
        and min(facts.q_length, facts.k_length) >= SHORTEST_CONTENT_BACKWARD
        and not torch.are_deterministic_algorithms_enabled() and refuse_device(facts.device) is None
    )  # fmt: skip


def blocks_of_keys(x: Inputs) -> int:
    """Of 128 keys, of all heads and batch rows."""
    return x.k.shape[0] * x.k.shape[1] * -(-x.k.shape[2] // 128)


def refuse_any_backward(x: Inputs, do: torch.Tensor) -> str | None:
    """Why neither backward kernel runs this call, or None."""
    if _failures:
        return f"it failed before: {_failures[0]}"
    if torch.are_deterministic_algorithms_enabled():
        return "dq is added in no fixed order, and deterministic algorithms are asked for"
    blocks = blocks_of_keys(x)
    if not FEWEST <= blocks <= MOST:
        return f"it needs {FEWEST} blocks of 128 keys to fill a device and takes up to {MOST}, got {blocks}"
    if bad_strides(do):
        return "the copy engine cannot read the output's gradient"
    return None


def bad_strides(x: torch.Tensor) -> bool:
    """Whether the copy engine cannot read x [B, heads, L, D]."""
    steps = [step for step, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    return x.stride(3) != 1 or x.data_ptr() % 16 != 0 or any(step % 8 != 0 or step <= 0 for step in steps)
