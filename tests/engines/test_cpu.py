"""The cpu engine against the float64 reference: every field of a plan, awkward lengths, gradients of every tensor."""

import warnings

import pytest
import torch

import posenc
from posenc.core.errors import UnsupportedPlan
from posenc.core.index import Grid, clip, deberta_buckets, exact, log_buckets
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines import blocked
from posenc.engines import further_axes as axes
from posenc.engines.cpu import block_sizes
from posenc.functional import attend, explain

B, H, D = 2, 4, 8


def leaf(*shape, dtype=torch.float64, scale=1.0):
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def tensors(q_length, k_length, *, kv_heads=H, v_size=D, dtype=torch.float64):
    return (
        leaf(B, H, q_length, D, dtype=dtype),
        leaf(B, kv_heads, k_length, D, dtype=dtype),
        leaf(B, kv_heads, k_length, v_size, dtype=dtype),
    )


def plans(positions, dtype=torch.float64, v_size=D):
    """One plan for each shape of problem; every tensor is a leaf."""
    span = exact(positions)
    length = positions.q_length
    return {
        "none": Plan(positions),
        "bias": Plan(positions, lookups=(Lookup(log_buckets(8, 20, causal=False), bias=leaf(H, 8, dtype=dtype)),)),
        "shared bias": Plan(positions, lookups=(Lookup(clip(3, 2), bias=leaf(1, 6, dtype=dtype)),), scale=1.0),
        "slopes": Plan(positions, slopes=leaf(H, dtype=dtype)),
        "keys": Plan(positions, lookups=(Lookup(clip(5, 3), dot_query=leaf(1, 9, D, dtype=dtype)),)),
        "keys and values": Plan(
            positions,
            lookups=(
                Lookup(clip(4, 6), dot_query=leaf(1, 11, D, dtype=dtype), add_value=leaf(H, 11, v_size, dtype=dtype)),
            ),
        ),
        "values": Plan(positions, lookups=(Lookup(clip(3, 3), add_value=leaf(1, 7, v_size, dtype=dtype)),)),
        "disentangled": Plan(
            positions,
            lookups=(
                Lookup(
                    deberta_buckets(8, 16),
                    dot_query=leaf(H, 16, D, dtype=dtype),
                    dot_key=leaf(H, 16, D, dtype=dtype),
                ),
            ),
            scale=0.2,
        ),
        "two indices": Plan(
            positions,
            lookups=(
                Lookup(clip(2, 7), dot_query=leaf(1, 10, D, dtype=dtype), bias=leaf(H, 10, dtype=dtype)),
                Lookup(clip(6, 1), dot_key=leaf(1, 8, D, dtype=dtype), add_value=leaf(1, 8, v_size, dtype=dtype)),
            ),
            slopes=leaf(H, dtype=dtype),
        ),
        "exact": Plan(
            positions,
            lookups=(Lookup(span, dot_query=leaf(H, span.n, D, dtype=dtype), bias=leaf(H, span.n, dtype=dtype)),),
        ),
        "states": Plan(
            positions,
            lookups=(
                Lookup(clip(9, 1), dot_query=leaf(1, 11, 3, dtype=dtype), states=leaf(B, H, length, 3, dtype=dtype)),
            ),
            scale=0.7,
        ),
        "decay": Plan(positions, decay=(leaf(B, H, length, dtype=dtype), leaf(B, H, positions.k_length, dtype=dtype))),
        "scale": Plan(positions, scale=leaf(H, 1, dtype=dtype), slopes=leaf(H, dtype=dtype)),
    }


def use_small_blocks(monkeypatch, short_keys=0):
    """Tiny blocks, so that short sequences have every kind of tile; up to `short_keys` keys count as short."""
    for name, value in dict(
        QUERY_BLOCK=24, EDGE_BLOCK=8, MIN_FAR_KEYS=4, DECODE_ROWS=3, SKEW_ROWS=5, DIAGONAL_ROWS=6, FORWARD_MEMORY=3000, FUSED_MEMORY=1, SCORE_ROWS=11, SCORE_MEMORY=2000,
        LARGE_MATRIX=300, SHORT_KEYS=short_keys, MANY_BATCH_ROWS=1, SHORT_ROWS=10,
    ).items():  # fmt: skip
        monkeypatch.setattr(block_sizes, name, value)
    monkeypatch.setattr(blocked, "SCORES", 1)
    monkeypatch.setattr(blocked, "FEWEST", 16)


NAMES = list(plans(Positions(4)))
LENGTHS = [(1, 1), (7, 7), (63, 63), (129, 129), (1, 40), (5, 40), (40, 7)]


def aligned(q_length, k_length):
    return Positions(q=(k_length - q_length, q_length) if q_length <= k_length else q_length, k=k_length)


def engine_for(plan):
    """The cpu engine runs every plan here but those with a scale for each query."""
    return "blocked" if isinstance(plan.scale, torch.Tensor) else "cpu"


def compare(q, k, v, plan, *, extra=(), among=None, tolerance=1e-9, engine=None, **options):
    """Output, log-sum-exp and the gradients of every leaf, against the reference."""
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors()), *extra] if among is None else among
    results = []
    for name in ("reference", engine or engine_for(plan)):
        out = attend(q, k, v, plan, engine=name, **options)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *gradients_of((out * weight).sum(), leaves)])
        out, lse = attend(q, k, v, plan, engine=name, return_lse=True, **options)
        both = (out * weight).sum() + (lse.masked_fill(lse.isneginf(), 0.0) * weight[..., 0].cos()).sum()
        results[-1] += [out, lse, *gradients_of(both, leaves)]
    for ours, theirs in zip(results[1], results[0]):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def gradients_of(loss, leaves):
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("q_length, k_length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_reference(name, q_length, k_length, causal):
    plan = plans(aligned(q_length, k_length))[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # more queries than keys: attend points out the alignment
        compare(*tensors(q_length, k_length), plan, causal=causal)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("q_length, k_length", [(61, 61), (40, 100), pytest.param(100, 40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"window": (None, 0)}, {"window": (20, 0)}, {"window": (30, 5)}], ids=str)
@pytest.mark.parametrize("short_keys", [0, 200])
def test_every_kind_of_tile(name, q_length, k_length, options, short_keys, monkeypatch):
    use_small_blocks(monkeypatch, short_keys)
    plan = plans(aligned(q_length, k_length))[name]
    compare(*tensors(q_length, k_length, kv_heads=2), plan, **options)
    key_mask = torch.ones(B, k_length, dtype=torch.bool)
    key_mask[0, k_length // 2 :] = False
    key_mask[1, 3::7] = False
    compare(*tensors(q_length, k_length), plan, key_mask=key_mask, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [3, (10, None), (None, 4), (0, 0)])
def test_window(name, window):
    plan = plans(aligned(40, 50))[name]
    compare(*tensors(40, 50), plan, window=window)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("q_length, k_length", [(1, 1), (1, 40), (5, 40), (40, 40), (9, 4)])
@pytest.mark.parametrize("options", [{}, {"window": (None, 0)}, {"window": (3, 0)}], ids=str)
def test_without_gradients(name, q_length, k_length, options):
    """Decoding: no operator, and for a few queries no blocks either."""
    plan = plans(aligned(q_length, k_length), v_size=5)[name]
    q, k, v = tensors(q_length, k_length, kv_heads=2, v_size=5)
    with torch.no_grad():
        ours, theirs = (attend(q, k, v, plan, engine=engine, **options) for engine in (engine_for(plan), "reference"))
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries(name, kv_heads):
    plan = plans(aligned(33, 40))[name]
    compare(*tensors(33, 40, kv_heads=kv_heads), plan, causal=True)


STACKS = {3_000: [1] * 6, 6_000: [1] * 3, 8_000: [2, 1], 10_000: [3]}
"""Memory, and how many of a batch's three rows share each head block: alone and in two parts, alone, one left over, all."""


@pytest.mark.parametrize("name", ["keys", "keys and values", "disentangled", "two indices", "exact"])
@pytest.mark.parametrize("memory", STACKS)
def test_rows_of_a_batch_in_stacks(name, memory, monkeypatch):
    from posenc.engines.cpu.head_block import split_heads
    from posenc.engines.cpu.terms import Terms

    q, k, v = (leaf(3, heads, 40, D) for heads in (H, 2, 2))
    cut = split_heads(q, k, Terms(*[None] * 8), memory=memory, rows=14, width=40, stacked=True)
    assert [head_block.batch.stop - head_block.batch.start for head_block in cut] == STACKS[memory]
    for size, value in dict(SHORT_ROWS=16, MANY_BATCH_ROWS=1, SCORE_MEMORY=memory).items():
        monkeypatch.setattr(block_sizes, size, value)
    compare(q, k, v, plans(Positions(40))[name], window=(30, 6))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("v_size", [5, 12])
def test_values_of_another_size(name, v_size):
    plan = plans(aligned(33, 40), v_size=v_size)[name]
    compare(*tensors(33, 40, v_size=v_size), plan)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", ["right", "left", "holes", "everything"])
def test_key_padding(name, padding):
    key_mask = torch.ones(B, 40, dtype=torch.bool)
    if padding == "right":
        key_mask[0, 25:] = False
    elif padding == "left":
        key_mask[1, :13] = False
    elif padding == "holes":
        key_mask[0, ::3] = False
        key_mask[1, 20:30] = False
    else:
        key_mask[1] = False
    plan = plans(aligned(40, 40))[name]
    compare(*tensors(40, 40), plan, key_mask=key_mask)
    compare(*tensors(40, 40), plan, key_mask=key_mask, causal=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 3)}], ids=str)
@pytest.mark.parametrize("name", ["none", "bias", "shared bias", "slopes"])
def test_tables_without_gradients(name, options, monkeypatch):
    """PyTorch's own backward kernel serves these."""
    use_small_blocks(monkeypatch)
    plan = plans(aligned(50, 60))[name]
    for _, tensor in plan.tensors():
        tensor.requires_grad_(False)
    q, k, v = tensors(50, 60, kv_heads=2, v_size=5)
    compare(q, k, v, plan, among=[q, k, v], **options)
    key_mask = torch.ones(B, 60, dtype=torch.bool)
    key_mask[0, 30:] = False
    compare(q, k, v, plan, among=[q, k, v], key_mask=key_mask, **options)
    key_mask[1, 10:20] = False
    compare(q, k, v, plan, among=[q, k, v], key_mask=key_mask, **options)


def test_a_fully_masked_query_gives_zeros():
    q, k, v = tensors(6, 6)
    plan = plans(Positions(6))["keys and values"]
    key_mask = torch.zeros(B, 6, dtype=torch.bool)
    key_mask[0, 4:] = True
    out = attend(q, k, v, plan, key_mask=key_mask, causal=True, engine="cpu")
    assert (out[0, :, :4] == 0).all() and (out[1] == 0).all() and (out[0, :, 4:] != 0).any()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty(lengths):
    q, k, v = tensors(*lengths)
    plan = Plan(aligned(*lengths), lookups=(Lookup(clip(3, 3), bias=leaf(H, 7)),))
    out = attend(q, k, v, plan, engine="auto")
    assert out.shape == (B, H, lengths[0], D) and (out == 0).all()


# ---- plans that the blocked engine runs ------------------------------------------------------------------------
def test_explicit_positions(monkeypatch):
    use_small_blocks(monkeypatch)
    shuffled = torch.stack([torch.randperm(50), torch.randperm(50) * 3])
    for name, plan in plans(Positions(shuffled[:, :37], shuffled)).items():
        del name
        compare(*tensors(37, 50), plan, engine="blocked")


@pytest.mark.parametrize("shape", ["same", "rows", "tail", "starts", "bytes"])
def test_consecutive_positions_are_found(shape, monkeypatch):
    """Explicit positions that are consecutive run as contiguous ones, with the same results."""
    steps, shift = torch.arange(40), torch.tensor([3, 70])
    positions = {
        "same": Positions(steps + 5),
        "rows": Positions(steps + shift[:, None]),
        "tail": Positions((steps + shift[:, None])[:, 30:], steps + shift[:, None]),
        "starts": Positions((shift + 30, 10), (shift, 40)),
        "bytes": Positions(steps.to(torch.uint8), (0, 40)),
    }[shape]
    for name in ("bias", "slopes", "keys and values", "disentangled", "exact"):
        compare(*tensors(positions.q_length, 40), plans(positions)[name], causal=True)
        compare(*tensors(positions.q_length, 40), plans(positions)[name])


def test_positions_that_are_not_contiguous():
    """A jump, a reversal, or batch rows with different offsets."""
    steps, shift = torch.arange(40), torch.tensor([[3], [70]])
    jump = torch.cat((steps[:39], steps[39:] + 1))
    cases = [
        Positions(jump),
        Positions(steps.flip(0)),
        Positions(steps + shift, (0, 40)),
        Positions((shift[:, 0], 40), (0, 40)),
    ]
    for positions in cases:
        q, k, v = tensors(40, 40)
        plan = plans(positions)["keys"]
        assert "not contiguous" in explain(q, k, v, plan).reasons["cpu"]
        compare(q, k, v, plan, engine="blocked")
        plan = plans(positions)["bias"]  # whose pairs are read one by one
        assert explain(q, k, v, plan).engine == "cpu"
        compare(q, k, v, plan)


def test_starts_of_rows():
    start = torch.tensor([3, 11])
    for plan in plans(Positions((start, 20), (start, 20))).values():
        compare(*tensors(20, 20), plan, causal=True)
    for plan in plans(Positions((start, 20), 20)).values():
        compare(*tensors(20, 20), plan, engine="auto")


def test_documents_and_masks(monkeypatch):
    use_small_blocks(monkeypatch)
    ids = torch.arange(45).div(10, rounding_mode="floor").repeat(B, 1)
    ids[1] += ids[1] % 2
    added = leaf(H, 45, 45)
    for plan in plans(Positions(45)).values():
        compare(*tensors(45, 45), plan, documents=ids, causal=True, engine="blocked")
        compare(*tensors(45, 45), plan, mask=added, extra=[added], engine="blocked")
        compare(*tensors(45, 45), plan, mask=torch.rand(B, 1, 45, 45) > 0.3, engine="blocked")


def test_pair_and_what_it_closes_over(monkeypatch):
    use_small_blocks(monkeypatch)
    weight = leaf(H, 1, 1)

    def pair(p_q, p_k):
        return (weight * torch.log1p((p_k[..., None, :] - p_q[..., :, None]).abs().double()))[None]

    compare(*tensors(45, 45), Plan(Positions(45), pair=pair), extra=[weight], engine="blocked")


def test_grid_and_second_axis(monkeypatch):
    use_small_blocks(monkeypatch)
    row, column = torch.arange(42) // 6, torch.arange(42) % 6
    grid = Grid((clip(6, 6), clip(5, 5, axis=1)))
    positions = Positions(torch.stack([row, column], -1)[None])
    compare(*tensors(42, 42), Plan(positions, lookups=(Lookup(grid, bias=leaf(H, grid.n)),)), engine="blocked")
    segments = (torch.arange(42) > 20).long()
    positions = Positions(42, 42, more=[(segments, segments)])
    lookups = (
        Lookup(clip(5, 5), dot_query=leaf(H, 11, D)),
        Lookup(clip(1, 1, axis=1), dot_query=leaf(H, 3, D), bias=leaf(H, 3)),
    )
    compare(*tensors(42, 42), Plan(positions, lookups=lookups), engine="blocked")


@pytest.mark.parametrize("heads", [1, H])
def test_few_positions_on_a_further_axis_are_channels(monkeypatch, heads):
    use_small_blocks(monkeypatch)
    calls, widen = [], axes.widen
    monkeypatch.setattr(axes, "widen", lambda *arguments: calls.append(1) or widen(*arguments))
    segments = torch.randint(0, 3, (B, 230))
    positions = Positions((30, 200), 230, more=[(segments[:, 30:], segments)])
    lookups = (
        Lookup(clip(5, 5), dot_query=leaf(H, 11, D), dot_key=leaf(1, 11, D), add_value=leaf(1, 11, D)),
        Lookup(
            clip(1, 1, axis=1), bias=leaf(H, 3), dot_query=leaf(heads, 3, D), dot_key=leaf(heads, 3, D),
            add_value=leaf(heads, 3, D),
        ),
    )  # fmt: skip
    compare(*tensors(200, 230), Plan(positions, lookups=lookups), causal=True)
    assert len(calls) >= 1
    calls.clear()
    compare(*tensors(200, 230), Plan(positions, lookups=lookups[:1]))
    assert not calls


def test_dropout(monkeypatch):
    """Exact where the weights are known: with one visible key and v = 1, each output is 0 or 1 / (1 - p)."""
    use_small_blocks(monkeypatch)
    q, k, v = tensors(200, 200)
    v = torch.ones_like(v).requires_grad_()
    out = attend(q, k, v, plans(Positions(200))["bias"], window=0, dropout=0.25, engine="blocked")
    kept = out[..., 0] != 0
    torch.testing.assert_close(out, kept[..., None] * torch.full_like(out, 4 / 3))
    assert 0.7 < kept.double().mean() < 0.8
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(gradient, out.detach())  # the same weights are dropped in the backward pass


def test_a_plan_without_terms_is_pytorchs_own_attention():
    q, k, v = tensors(30, 30, kv_heads=2)
    ours = attend(q, k, v, Plan(Positions(30), scale=0.3), causal=True, engine="sdpa")
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(ours, theirs)


def test_refuses_other_devices_in_words():
    q = torch.empty(1, H, 8, D, device="meta")
    plan = Plan(Positions(8), lookups=(Lookup(clip(3, 3), bias=torch.empty(H, 7, device="meta")),))
    with pytest.raises(UnsupportedPlan, match="built on PyTorch's fused CPU attention, the tensors are on meta"):
        attend(q, q, q, plan, engine="cpu")
    assert attend(q, q, q, Plan(Positions(8)), causal=True, engine="auto").shape == q.shape


@pytest.mark.parametrize("name", ["none", "bias", "keys"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_query_of_nan_gives_nan(name, causal, dtype):
    """PyTorch's kernel gives zeros where keys are fewer than a vector register holds."""
    for rows, keys in ((9, 9), (1, 3), (1, 15), (15, 15), (16, 16), (1, 16), (1, 17), (2, 40), (33, 33)):
        q, k, v = (x.detach().to(dtype) for x in tensors(rows, keys))
        q[0, 1, 0, 2] = float("nan")
        plan = plans(Positions((keys - rows, rows), keys))[name]
        for engine in ("cpu", "auto", *(["sdpa"] if name == "none" and (rows in (1, keys)) else [])):
            out = attend(q, k, v, plan, causal=causal, engine=engine)
            assert out[0, 1, 0].isnan().all(), (rows, keys, engine)
            assert out.isnan().sum() == D, (rows, keys, engine)


@pytest.mark.parametrize("name", ["none", "bias", "keys"])
@pytest.mark.parametrize("train", [False, True])
def test_any_memory_layout(name, train):
    """Kernels read rows of numbers that lie side by side; q, k, v and the output's gradient may come otherwise."""
    plan = plans(Positions(9))[name]
    for _, tensor in plan.tensors():
        tensor.requires_grad_(train)
    q, k, v = (leaf(B, H, D, 9) for _ in range(3))
    results = []
    for engine in ("reference", "cpu"):
        out = attend(*(x.transpose(2, 3) for x in (q, k, v)), plan, causal=True, engine=engine)
        gradient = torch.linspace(0, 1, out.numel(), dtype=out.dtype).view(B, H, D, 9).transpose(2, 3)
        results.append([out, *torch.autograd.grad(out, (q, k, v), gradient)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_which_sequences_are_short():
    from posenc.core.mask import Mask
    from posenc.engines.cpu import short_forward
    from posenc.engines.cpu.terms import make_terms
    from posenc.engines.lowering import lower_plan

    def taken(batch, length, size=32, values=False):
        encoding = posenc.create("shaw", heads=4, head_dim=size, max_distance=16, values=values)
        q = torch.randn(batch, 4, length, size)
        return short_forward.applies(q, *make_terms(q, lower_plan(q, q, q, encoding.plan(Positions(length)), Mask())))

    assert taken(32, 64) and taken(1, 512, values=True)
    assert not taken(1, 64) and not taken(32, 512) and not taken(1, 513, values=True)
