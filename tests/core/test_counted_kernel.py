"""The CUDA kernel that counts real tokens against PyTorch's operations: by Triton's interpreter where there is no device."""

import pytest
import torch

from posenc import Attention, KVCache, create
from posenc.nn import sequence
from posenc.nn.sequence import count_tokens
from tests.core.interpreted import run_interpreted

CASES = [(1, 1, 0, 4), (3, 5, 0, 8), (2, 9, 4, 33), (1, 1030, 1500, 16), (2, 3, 1, 520)]
"""(batch, length, past, width); the fourth counts in several steps, the last adds its channels in two."""


def check(device, dtypes=(torch.float32, torch.float16), cases=CASES):
    from posenc.core.counted_kernel import add_counted, supports

    for batch, length, past, width in cases:
        for dtype in dtypes:
            x = torch.randn(batch, length, width + 3, device=device, dtype=dtype)[..., :width]
            rows = torch.randn(past + length, width, device=device, dtype=dtype)
            real = torch.rand(past + length, batch, device=device).t() < 0.7
            real[0] &= torch.arange(past + length, device=device) >= (past + length) // 2
            for mask in (real, real.contiguous(), real[:1].expand(batch, -1)):
                assert supports(x, rows, mask)
                positions = count_tokens(None, mask, batch)[:, past:]
                assert torch.equal(add_counted(x, rows, mask), x + rows[positions]), (batch, length, past, width, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested on the device")
def test_the_kernel_by_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("from tests.core.test_counted_kernel import check; check('cpu')")


@pytest.mark.parametrize("other", ["dtype", "width", "mask", "batch"])
def test_what_does_not_fit_is_left_to_pytorch(other):
    pytest.importorskip("triton")
    from posenc.core.counted_kernel import supports

    x, rows, real = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.ones(2, 3, dtype=torch.bool)
    assert supports(x, rows, real)
    changed = {
        "dtype": (rows.double(), real), "width": (rows[:, :1], real), "mask": (rows, real.long()), "batch": (rows, real[:1]),
    }  # fmt: skip
    assert not supports(x, *changed[other])


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_a_layer_has_the_same_bits_with_it(name, monkeypatch):
    """Without gradients, without documents, and behind a cache, with a stand-in for the kernel."""
    pytest.importorskip("triton")
    from posenc.core import counted_kernel

    calls = []

    def add_counted(x, rows, real):
        calls.append(x.shape)
        return x + rows[count_tokens(None, real, x.shape[0])[:, real.shape[1] - x.shape[1] :]]

    options = {"max_length": 16} if name == "learned" else {}
    layer = Attention(16, 2, encoding=create(name, d_model=16, heads=2, **options), causal=True)
    x, real = torch.randn(2, 9, 16), torch.arange(9) >= torch.tensor([[0], [4]])
    documents = (torch.arange(9) > 5).long().expand(2, -1)

    def results():
        cache = KVCache()
        with torch.no_grad():
            found = [layer(x, key_mask=real), layer(x[:, :7], key_mask=real[:, :7], cache=cache)]
            found += [layer(x[:, 7:], cache=cache), layer(x, key_mask=real, documents=documents)]
        return [*found, layer(x, key_mask=real)]

    expected = results()
    monkeypatch.setattr(sequence, "_is_counted_in_kernel", lambda x: True)
    monkeypatch.setattr(counted_kernel, "add_counted", add_counted)
    for ours, other in zip(results(), expected, strict=True):
        assert torch.equal(ours, other)
    # a training step of a table that learns counts by PyTorch's operations, and so do documents
    assert calls == [(2, 9, 16), (2, 7, 16), (2, 2, 16)] + [(2, 9, 16)] * (name == "sinusoidal")
