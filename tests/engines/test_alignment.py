"""Half-precision heads of any size and stride reach the kernels as multiples of 16 numbers."""

import pytest
import torch

pytest.importorskip("triton")

from posenc.engines.triton.alignment import UNIT, align_rows, pad_heads
from posenc.engines.triton.arguments import Inputs, mask_unit, with_whole_rows


def tensor(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def make_inputs(size, v_size, dtype=torch.bfloat16, states=None):
    return Inputs(
        tensor(1, 2, 5, size, dtype=dtype), tensor(1, 2, 7, size, dtype=dtype), tensor(1, 2, 7, v_size, dtype=dtype),
        states=states, table=tensor(2, 3, size if states is None else states.shape[-1]), key_table=tensor(2, 3, size),
        value=tensor(2, 3, v_size),
    )  # fmt: skip


@pytest.mark.parametrize(("size", "v_size"), [(33, 8), (8, 64), (72, 72), (1, 1)])
def test_columns_of_zeros_fill_a_head(size, v_size):
    x = make_inputs(size, v_size)
    padded = pad_heads(x)
    for name in ("q", "k", "v", "table", "key_table", "value"):
        before, after = getattr(x, name), getattr(padded, name)
        assert after.shape[-1] % UNIT == 0 and after.shape[-1] - before.shape[-1] < UNIT
        assert torch.equal(after[..., : before.shape[-1]], before) and not after[..., before.shape[-1] :].any()


def test_states_keep_their_size():
    x = make_inputs(33, 8, states=tensor(1, 2, 5, 3))
    padded = pad_heads(x)
    assert padded.table is x.table and padded.states is x.states


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.bfloat16), (48, torch.float16), (33, torch.float32)])
def test_what_needs_no_copy_is_not_copied(size, dtype):
    x = make_inputs(size, size, dtype)
    assert pad_heads(x) is x


def test_rows_begin_at_aligned_addresses():
    aligned = tensor(2, 5, 4, 64).transpose(1, 2)
    assert align_rows(aligned) is aligned
    assert align_rows(aligned[:1].expand(3, -1, -1, -1)).stride(0) == 0  # one row for the whole batch
    for odd in (tensor(2, 4, 5, 65)[..., :64], tensor(2, 4, 5, 65)[..., 1:], tensor(2, 4, 64, 6).transpose(2, 3)):
        copy = align_rows(odd)
        assert torch.equal(copy, odd) and copy.is_contiguous() and copy.data_ptr() % 16 == 0
    single = tensor(2, 4, 5, 65, dtype=torch.float32)[..., 1:]
    assert align_rows(single) is single


def test_rows_of_dense_masks_begin_at_whole_units():
    """One kernel then serves all lengths: a mask that does not is copied, once for all rows, heads and queries that share it."""
    for mask in (
        torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 8)[..., :7], torch.randn(1, 1, 1, 7).expand(2, 3, 5, 7),
        torch.randn(2, 3, 7, 5).transpose(2, 3), torch.rand(2, 1, 5, 7).lt(0.5).view(torch.uint8).expand(2, 3, 5, 7),
    ):  # fmt: skip
        made, unit = with_whole_rows(mask), mask_unit(mask)
        assert torch.equal(made, mask)
        assert made.stride(3) == 1 and not any(step % unit for step in made.stride()[:3])
        assert all(step == 0 for step, before in zip(made.stride(), mask.stride(), strict=True) if before == 0)
    whole = torch.randn(2, 3, 5, 8)
    assert with_whole_rows(whole) is whole
    assert with_whole_rows(whole[..., :7]).data_ptr() == whole.data_ptr()
