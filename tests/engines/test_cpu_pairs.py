"""Biases that are read pair by pair on a CPU: any positions under any mask, against the float64 reference and its error budgets."""

import warnings
from collections import Counter
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import posenc
from posenc.core.index import Grid, clip, exact, log_buckets
from posenc.core.memo import Memo
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines import blocked
from posenc.engines.cpu import block_sizes, pair_blocks, pairs_training
from posenc.functional import attend, explain
from tests import budget

B, H, D = 3, 4, 8


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def tensors(q_length, k_length, *, kv_heads=H, v_size=D, dtype=torch.float64, batch=B):
    sizes = ((H, q_length, D), (kv_heads, k_length, D), (kv_heads, k_length, v_size))
    return tuple(leaf(batch, *size, dtype=dtype) for size in sizes)


def grid_plan(rows, columns, q_length, k_length, dtype=torch.float64):
    """A table over a grid of patches, the queries being the last of them."""
    index = Grid((clip(rows - 1, rows - 1, axis=1), clip(columns - 1, columns - 1, axis=2)))
    at = torch.arange(k_length)
    axes = [(x[k_length - q_length :], x) for x in (at // columns, at % columns)]
    positions = Positions((k_length - q_length, q_length), k_length, more=axes)
    return Plan(positions, lookups=(Lookup(index, bias=leaf(H, index.n, dtype=dtype)),))


def plans(q_length, k_length, dtype=torch.float64):
    """Everything that is read pair by pair."""
    gaps = torch.arange(k_length) * 2 + (torch.arange(k_length) > k_length // 2) * 7
    one = Positions(gaps[k_length - q_length :], gaps)
    rows = torch.stack([torch.randperm(k_length) for _ in range(B)])
    each = Positions(rows[:, k_length - q_length :], rows)
    bucket = log_buckets(8, 20, causal=False)
    span = exact(one)
    return {
        "grid": grid_plan(7, 6, q_length, k_length, dtype),
        "gaps": Plan(one, lookups=(Lookup(bucket, bias=leaf(H, 8, dtype=dtype)),)),
        "shared table": Plan(each, lookups=(Lookup(clip(3, 2), bias=leaf(1, 6, dtype=dtype)),), scale=-0.7),
        "two tables": Plan(
            each,
            lookups=(Lookup(bucket, bias=leaf(H, 8, dtype=dtype)), Lookup(clip(9, 1), bias=leaf(1, 11, dtype=dtype))),
        ),
        "sparse": Plan(one, lookups=(Lookup(span, bias=leaf(H, span.n, dtype=dtype)),)),
        "slopes": Plan(each, slopes=leaf(H, dtype=dtype)),
        "decay": Plan(
            one, slopes=leaf(H, dtype=dtype), decay=(leaf(B, H, q_length, dtype=dtype), leaf(B, H, k_length, dtype=dtype))
        ),
        "shared decay": Plan(
            each, lookups=(Lookup(bucket, bias=leaf(H, 8, dtype=dtype)),),
            decay=(leaf(1, H, q_length, dtype=dtype), leaf(1, H, k_length, dtype=dtype)),
        ),
        "scale": Plan(one, lookups=(Lookup(bucket, bias=leaf(H, 8, dtype=dtype)),), scale=leaf(H, 1, dtype=dtype)),
    }  # fmt: skip


def masks(q_length, k_length):
    """Every mask, some of which leave queries without a key."""
    keys = torch.rand(B, k_length) > 0.3
    keys[1, k_length // 2 :] = False
    keys[2] = False
    ids = torch.arange(k_length).div(9, rounding_mode="floor").repeat(B, 1)
    ids[1] += ids[1] % 2
    added = torch.randn(B, 1, q_length, k_length, dtype=torch.float64)
    added[added > 1.0] = float("-inf")
    added[0, :, 0] = float("-inf")
    column = torch.zeros(1, H, 1, k_length)
    column[0, 1, 0, ::2] = float("-inf")
    return {
        "none": {},
        "causal": dict(causal=True),
        "window": dict(window=(5, 2)),
        "padding": dict(key_mask=keys, causal=True),
        "documents": dict(documents=(ids[:, k_length - q_length :], ids), causal=True),
        "same documents": dict(documents=(ids[:1, k_length - q_length :], ids[:1]), causal=True, window=6),
        "booleans": dict(mask=torch.rand(1, H, q_length, k_length) > 0.4),
        "rows of booleans": dict(mask=torch.rand(q_length, 1) > 0.4),
        "added": dict(mask=added, causal=True),
        "added to keys": dict(mask=column, causal=True),
    }


NAMES, MASKS = list(plans(4, 4)), list(masks(4, 4))


@pytest.fixture(params=["whole", "blocks", "fused", "fused blocks"])
def form(request, monkeypatch):
    """Probabilities kept or made again, everything at once or in blocks of texts, queries and heads whose sizes divide nothing."""
    monkeypatch.setattr(pair_blocks, "_kept", Memo(8, 1 << 20))
    if "fused" in request.param:
        monkeypatch.setattr(block_sizes, "KEPT_SCORES", 0)
    if "blocks" in request.param:
        monkeypatch.setattr(blocked, "SCORES", 1)
        monkeypatch.setattr(blocked, "FEWEST", 9)
        monkeypatch.setattr(blocked, "LEAST", 1)
        monkeypatch.setattr(block_sizes, "PAIR_SCORES", 700)
        monkeypatch.setattr(block_sizes, "FEWEST_SCORES", 1)
        monkeypatch.setattr(block_sizes, "VARIED_SCORES", 2 * H * 42 * 42)
    return request.param


def results(q, k, v, plan, engine, options, return_lse=False):
    """Output, log-sum-exp and every gradient."""
    leaves = [q, k, v, *(tensor for _, tensor in plan.tensors())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # more queries than keys: attend points out the alignment
        found = attend(q, k, v, plan, engine=engine, return_lse=return_lse, **options)
    out, lse = found if return_lse else (found, None)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    loss = (out * weight).sum()
    if lse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0.0) * weight[..., 0].cos()).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        out,
        *([] if lse is None else [lse]),
        *[torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)],
    ]


def compare(q, k, v, plan, **options):
    for return_lse in (False, True):
        both = [results(q, k, v, plan, engine, options, return_lse) for engine in ("cpu", "reference")]
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("q_length, k_length", [(42, 42), (11, 42), (1, 42)])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name, masked, q_length, k_length, form):
    options = masks(q_length, k_length)[masked]
    q, k, v = tensors(q_length, k_length)
    plan = plans(q_length, k_length)[name]
    assert explain(q, k, v, plan, **options).engine == "cpu"
    compare(q, k, v, plan, **options)


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(4, 0))], ids=str)
def test_more_queries_than_keys(options, form):
    """The first ones see none."""
    at = torch.arange(42) * 3
    plan = Plan(Positions(at, at[:13]), lookups=(Lookup(clip(20, 20), bias=leaf(H, 41)),), slopes=leaf(H))
    compare(*tensors(42, 13), plan, **options)


@pytest.mark.parametrize("name", ["grid", "shared table", "slopes", "decay"])
@pytest.mark.parametrize("masked", ["none", "causal", "padding", "documents", "booleans"])
def test_grouped_heads_and_other_value_sizes(name, masked, form):
    for kv_heads, v_size in ((2, D), (1, 5), (H, 13)):
        compare(*tensors(42, 42, kv_heads=kv_heads, v_size=v_size), plans(42, 42)[name], **masks(42, 42)[masked])


@pytest.mark.parametrize("masked", ["documents", "added", "same documents"])
def test_masks_of_long_texts_without_terms(masked, form):
    """Consecutive positions, which tables by distance would express, and a plan that adds nothing."""
    options = masks(42, 42)[masked]
    for plan in (Plan(Positions(42), slopes=leaf(H)), Plan(Positions(42), decay=(leaf(B, H, 42), leaf(B, H, 42)))):
        compare(*tensors(42, 42), plan, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["grid_bias", "class token", "continuous_bias"])
def test_tables_over_a_grid(kind, causal, form):
    """Numbered patches, whose blocks are kept: other tables and batches after the first call find them."""
    options = dict(class_token=True) if kind == "class token" else {}
    name = "grid_bias" if kind == "class token" else kind
    for batch in (1, 3):
        encoding = posenc.create(name, heads=H, window=(5, 7), **options).double()
        q, k, v = tensors(35 + bool(options), 35 + bool(options), batch=batch)
        leaves, both = [q, k, v, *encoding.parameters()], []
        g = torch.randn_like(q)
        for engine in ("auto", "reference"):
            out = attend(q, k, v, encoding.plan(Positions(q.shape[2])), causal=causal, engine=engine)
            both.append([out, *torch.autograd.grad(out, leaves, g)])
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    assert explain(q, k, v, encoding.plan(Positions(q.shape[2])), causal=causal).engine == "cpu"
    assert len(pair_blocks._kept) == 1


def test_without_gradients_it_is_pytorchs_attention():
    q, k, v = (x.detach().float() for x in tensors(35, 35))
    encoding = posenc.create("grid_bias", heads=H, window=(5, 7), std=1.0)
    at = torch.arange(35)
    rows = ((at // 7)[:, None] - at // 7 + 4) * 13 + (at % 7)[:, None] - at % 7 + 6
    bias = encoding.table.detach()[rows].permute(2, 0, 1)[None].contiguous()
    with torch.no_grad():
        ours = attend(q, k, v, encoding.plan(Positions(35)))
    assert torch.equal(ours, scaled_dot_product_attention(q, k, v, bias.expand(B, -1, -1, -1)))


@pytest.mark.parametrize("name", ["grid", "gaps", "two tables", "decay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [42, 131])
def test_every_number_is_within_its_budget(name, dtype, length, form):
    q, k, v = tensors(length, length, kv_heads=2, dtype=dtype)
    plan = grid_plan(11, 12, length, length, dtype) if name == "grid" else plans(length, length, dtype)[name]
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    real = torch.ones(B, length, dtype=torch.bool)
    real[0, : length // 3] = False
    g, g_lse = torch.randn(B, H, length, D).to(dtype), torch.randn(B, H, length)
    exp = 0.0 if dtype == torch.float32 else budget.HALF_EXP
    for options in (dict(causal=True), dict(causal=True, key_mask=real)):
        out = attend(q, k, v, plan, engine="cpu", **options)
        found = {"out": out, **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)))}
        expected, allowed = budget.expect(q, k, v, plan, g, exp=exp, **options)
        for number, ours in found.items():
            budget.assert_within(ours, expected[number], allowed[number], number)
        out, lse = attend(q, k, v, plan, engine="cpu", return_lse=True, **options)
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (g, g_lse))
        expected, allowed = budget.expect(q, k, v, plan, g, g_lse, exp=exp, **options)
        for number, ours in {"out": out, "lse": lse, **dict(zip(leaves, grads))}.items():
            budget.assert_within(ours, expected[number], allowed[number], number)


def test_gradcheck(form):
    q, k, v = tensors(6, 9)
    at = torch.randperm(9) * 2
    table, slopes, decays = leaf(H, 7), leaf(H), (leaf(B, H, 6), leaf(B, H, 9))

    def run(q, k, v, table, slopes, *decays):
        plan = Plan(Positions(at[3:], at), lookups=(Lookup(clip(3, 3), bias=table),), slopes=slopes, decay=decays)
        return attend(q, k, v, plan, causal=True, engine="cpu", return_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v, table, slopes, *decays), fast_mode=True)


def test_second_derivatives_say_where_they_are(form):
    q, k, v = tensors(9, 9)
    plan = plans(9, 9)["gaps"]
    (d_table,) = torch.autograd.grad(
        attend(q, k, v, plan, engine="cpu").square().sum(), plan.lookups[0].bias, create_graph=True
    )
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(d_table.sum(), q)


@pytest.mark.parametrize("masked", ["causal", "documents", "added"])
@pytest.mark.parametrize("name", ["grid", "two tables", "decay"])
def test_poisoned_memory_and_the_same_bits_twice(name, masked, form):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(8).isnan().all()
        q, k, v = tensors(42, 42, dtype=torch.float32)
        plan, options = plans(42, 42, torch.float32)[name], masks(42, 42)[masked]
        options = {key: x.float() if key == "mask" else x for key, x in options.items()}
        first, second = (results(q, k, v, plan, "cpu", options) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    for ours, again in zip(first, second, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, again)


def test_positions_that_change_in_place_are_read_again():
    at = torch.arange(20) * 3
    table = leaf(H, 9)
    q, k, v = tensors(20, 20)
    for _ in range(2):
        compare(q, k, v, Plan(Positions(at), lookups=(Lookup(clip(4, 4), bias=table),)), causal=True)
        at.copy_(at.flip(0))
    encoding = posenc.create("grid_bias", heads=H, window=(4, 5), std=1.0).double()
    for _ in range(2):
        compare(q, k, v, encoding.plan(Positions(20)), causal=True)
        with torch.no_grad():
            encoding.table.mul_(-2.0)


@pytest.mark.parametrize("name", ["key_mask", "documents", "mask", "positions", "starts"])
def test_a_backward_pass_after_a_change_in_place_is_refused(name, form):
    """As everywhere in autograd: it would read other pairs than the forward pass."""
    at, starts, real = torch.arange(42) * 3, torch.arange(B), torch.rand(B, 42) > 0.3
    ids, added = torch.zeros(B, 42, dtype=torch.int64), torch.randn(42, 42)
    options = {"key_mask": dict(key_mask=real), "documents": dict(documents=ids), "mask": dict(mask=added)}.get(
        name, {}
    )
    positions = Positions((starts, 42), at) if name == "starts" else Positions(at)
    q, k, v = tensors(42, 42)
    for changed in (False, True):
        out = attend(q, k, v, Plan(positions, slopes=leaf(H)), engine="cpu", **options)
        if changed:
            {"key_mask": real, "documents": ids, "mask": added, "positions": at, "starts": starts}[name].zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


@pytest.mark.parametrize("name", ["grid", "gaps", "slopes"])
def test_nan_is_seen_where_it_is_visible_only(name, form):
    """Queries of few keys too, where PyTorch's kernel would give zeros."""
    for length in (9, 33):
        plan = plans(length, length)[name]
        for place in ("query", "key", "value"):
            q, k, v = (x.detach() for x in tensors(length, length))
            {"query": q, "key": k, "value": v}[place][1, 2, 5, 3] = float("nan")
            out = attend(q, k, v, plan, causal=True, engine="cpu").detach()
            hit = torch.zeros(B, H, length, dtype=torch.bool)
            hit[1, 2, 5 : 6 if place == "query" else None] = True
            assert torch.equal(out.isnan().any(-1), hit), (length, place)


@pytest.mark.parametrize("masked", ["none", "causal", "padding"])
@pytest.mark.parametrize("rows", [slice(0, 7), slice(0, 4), slice(3, 4)], ids=str)
def test_a_table_may_hide_all_keys_of_a_query(rows, masked, form):
    """Zeros and zero gradients, as behind a mask."""
    table, at = leaf(H, 7), torch.arange(42) * 2
    with torch.no_grad():
        table[0, rows] = float("-inf")
    compare(*tensors(42, 42), Plan(Positions(at), lookups=(Lookup(clip(3, 3), bias=table),)), **masks(42, 42)[masked])


def functions(q_length, k_length):
    """Functions of positions of every shape that they may return, beside other terms, and the tensor that some of them read."""
    weight = leaf(H, 1, 1)
    one = Positions(torch.arange(k_length)[k_length - q_length :] * 2, torch.arange(k_length) * 2)
    rows = torch.randint(0, 60, (B, k_length))
    each = Positions(rows[:, k_length - q_length :], rows)

    def of(p_q, p_k):
        return (0.3 * p_k[..., None, :] - (p_q[..., :, None] + 1.0).sqrt()).cos().double()

    grid = grid_plan(7, 6, q_length, k_length)
    return weight, {
        "pairs": Plan(one, pair=of),
        "heads": Plan(one, pair=lambda p_q, p_k: weight * of(p_q, p_k)),
        "texts": Plan(each, pair=lambda p_q, p_k: of(p_q, p_k)[:, None], slopes=leaf(H)),
        "all": Plan(one, pair=lambda p_q, p_k: (weight * of(p_q, p_k)).expand(B, -1, -1, -1), slopes=leaf(H)),
        "axes": replace(grid, pair=lambda p_q, p_k: weight * of(p_q[..., 1], p_k[..., 2]), pair_axes=True),
        "hides": Plan(one, pair=lambda p_q, p_k: torch.where(p_q[:, None] % 3 > p_k % 4, -torch.inf, of(p_q, p_k))),
    }


@pytest.mark.parametrize("q_length, k_length", [(42, 42), (11, 42)])
@pytest.mark.parametrize("masked", ["none", "causal", "window", "padding", "documents", "added"])
@pytest.mark.parametrize("name", list(functions(4, 4)[1]))
def test_functions_of_positions(name, masked, q_length, k_length, form, monkeypatch):
    monkeypatch.setattr(blocked, "FUNCTION_PAIRS", 1)
    leaves, options = tensors(q_length, k_length), masks(q_length, k_length)[masked]
    weight, plans = functions(q_length, k_length)
    plan = plans[name]
    leaves = [*leaves, *(tensor for _, tensor in plan.tensors()), weight]
    with torch.no_grad():
        assert explain(*leaves[:3], plan, **options).engine == "cpu"
        ours, theirs = (attend(*leaves[:3], plan, engine=x, **options) for x in ("cpu", "reference"))
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    assert explain(*leaves[:3], plan, **options).engine == "cpu"
    assert explain(*leaves[:3], plan, return_lse=True, **options).engine == "blocked"
    found = []
    for engine in ("cpu", "reference"):
        out = attend(*leaves[:3], plan, engine=engine, **options)
        torch.testing.assert_close(out, theirs, atol=1e-10, rtol=1e-10)
        of = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found.append(torch.autograd.grad(out, leaves, of, allow_unused=True, materialize_grads=True))
    assert found[0][-1].any() == (name not in ("pairs", "texts", "hides"))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fire_in_training_is_within_its_budget(dtype):
    """Past its threshold, in several blocks, which are made again for the gradients."""
    encoding = posenc.Fire(heads=H, threshold=16.0)
    x = [leaf(2, H, 700, D, dtype=dtype) for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in x]
    wide = posenc.Fire(heads=H, threshold=16.0).double()
    wide.load_state_dict(encoding.state_dict())
    both = []
    for tensors, own, engine in ((x, encoding, "cpu"), (exact, wide, "reference")):
        out = attend(*tensors, own.plan(Positions(700)), causal=True, engine=engine)
        own.last.bias.requires_grad_(False)  # the same for all keys: its gradient is zero
        leaves = [*tensors, *(x for x in own.parameters() if x.requires_grad)]
        both.append([out, *torch.autograd.grad(out.double().cos().sum(), leaves)])
    for ours, theirs in zip(*both, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("seen", ["some", "none"])
def test_gradients_of_functions_of_positions_where_texts_are_all_padding(seen, form):
    weight, plans = functions(42, 42)
    q, k, v = tensors(42, 42)
    real = torch.zeros(B, 42, dtype=torch.bool)
    real[0, :9] = seen == "some"
    both = []
    for engine in ("cpu", "reference"):
        out = attend(q, k, v, plans["heads"], key_mask=real, engine=engine)
        both.append([out, *torch.autograd.grad(out.cos().sum(), (q, k, v, weight))])
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_attention_does_not_run_again_where_a_block_is_made_again(monkeypatch):
    calls = Counter()

    def count(name, function):
        def call(*arguments):
            calls[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(blocked, "SCORES", 1)
    monkeypatch.setattr(blocked, "FUNCTION_PAIRS", 1)
    monkeypatch.setattr(pairs_training, "without_gradients", count("attention", pairs_training.without_gradients))
    weight = leaf(H, 1, 1)
    pair = count("pair", lambda p_q, p_k: weight * (p_k - p_q[:, None]).double().cos())
    q, k, v = tensors(42, 42)
    out = attend(q, k, v, Plan(Positions(42), pair=pair), causal=True)
    assert calls == {"attention": 3, "pair": 3}
    out.sum().backward()
    assert calls == {"attention": 3, "pair": 6}
    assert weight.grad.any()


def test_nothing_of_the_size_of_the_scores_is_kept_of_functions_of_positions(monkeypatch):
    monkeypatch.setattr(blocked, "SCORES", 1 << 12)
    q, k, v = tensors(200, 200)
    weight = leaf(H, 1, 1)
    plan = Plan(Positions(200), pair=lambda p_q, p_k: weight * (p_k - p_q[:, None]).double().cos())
    assert count_saved(lambda: attend(q, k, v, plan, causal=True)) < B * H * 200 * 200 // 4


@pytest.mark.parametrize("name", ["q", "key_mask", "positions"])
def test_a_change_in_place_before_a_block_is_made_again_is_refused(name, monkeypatch):
    monkeypatch.setattr(blocked, "SCORES", 1)
    monkeypatch.setattr(blocked, "FUNCTION_PAIRS", 1)
    given = {"q": tensors(42, 42)[0], "key_mask": torch.rand(B, 42) > 0.3, "positions": torch.arange(42) * 2}
    _, k, v = tensors(42, 42)
    plan = Plan(Positions(given["positions"]), pair=lambda p_q, p_k: (p_k - p_q[:, None]).double())
    out = attend(given["q"], k, v, plan, key_mask=given["key_mask"], engine="cpu")
    with torch.no_grad():
        given[name].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_of_functions_of_positions_say_where_they_are():
    weight, plans = functions(42, 42)
    q, k, v = tensors(42, 42)
    (d_q,) = torch.autograd.grad(attend(q, k, v, plans["heads"]).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(d_q.sum(), weight)


def test_blocks_of_functions_of_positions_are_not_kept():
    """They would hold a bool for each hidden pair, and no other plan reads them."""
    patches = posenc.create("grid_bias", heads=H, window=(6, 7)).double().plan(Positions(42)).positions
    assert patches.is_constant
    q, k, v = tensors(42, 42)
    before = len(pair_blocks._kept._entries)
    with torch.no_grad():
        attend(q, k, v, Plan(patches, pair=lambda p_q, p_k: (p_k - p_q[:, None]).double()), causal=True)
    assert len(pair_blocks._kept._entries) == before


@pytest.mark.parametrize("gradient", [False, True])
def test_functions_of_positions_are_called_for_few_pairs(gradient):
    pairs = []

    def count(p_q, p_k):
        pairs.append(len(p_q) * len(p_k))
        return (p_k - p_q[:, None]).abs().float()

    q = torch.randn(1, 1, 2000, 8, requires_grad=gradient)
    with torch.set_grad_enabled(gradient):
        attend(q, q, q, Plan(Positions(2000), pair=count), causal=True)
    assert len(pairs) > 20
    assert max(pairs) <= blocked.FUNCTION_PAIRS


def count_saved(call):
    """Numbers that autograd keeps for a call."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        call()
    return sum(sizes)


def test_what_is_kept_for_the_backward_pass(monkeypatch):
    """The probabilities of short texts, and nothing of the size of the scores of long ones."""
    q, k, v = (x.float().detach().requires_grad_() for x in tensors(200, 200))
    encoding = posenc.create("grid_bias", heads=H, window=(10, 20))
    few = B * H * 200 * 200
    for most, kept in ((few, few), (few - 1, 0)):
        monkeypatch.setattr(block_sizes, "KEPT_SCORES", most)
        count = count_saved(lambda: attend(q, k, v, encoding.plan(Positions(200)), causal=True))
        count -= q.numel() + k.numel() + v.numel() + encoding.table.numel()
        assert bool(kept) == (count > few // 3)
        assert count <= kept


def test_blocks_of_a_grid_that_is_too_large_to_be_kept_are_made_one_by_one(monkeypatch):
    alive, most = WeakSet(), []

    class Counted(pair_blocks.Block):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr(pair_blocks, "Block", Counted)
    monkeypatch.setattr(pair_blocks, "_kept", Memo(8, 200 * 200))
    monkeypatch.setattr(block_sizes, "KEPT_SCORES", 0)
    monkeypatch.setattr(blocked, "LEAST", 1)
    encoding = posenc.create("grid_bias", heads=H, window=(10, 20)).double()
    q, k, v = tensors(200, 200)
    attend(q, k, v, encoding.plan(Positions(200)), causal=True).sum().backward()
    assert len(most) >= 6
    assert max(most) <= 2


def test_who_runs_what():
    """Dropout needs the probabilities, a learned mask its own gradient, and content terms the queries."""
    encoding = posenc.create("grid_bias", heads=H, window=(6, 7)).double()
    plan = encoding.plan(Positions(42))
    q, k, v = tensors(42, 42)
    assert explain(q, k, v, plan, causal=True).engine == "cpu"
    assert explain(q, k, v, plan).engine == "cpu"
    assert explain(q, k, v, plan, causal=True, dropout=0.1).engine == "blocked"
    assert explain(q, k, v, plan, mask=leaf(42, 42)).engine == "blocked"
    assert "dropout needs the probabilities" in explain(q, k, v, plan, dropout=0.1).reasons["cpu"]
    assert "the mask wants a gradient" in explain(q, k, v, plan, mask=leaf(42, 42)).reasons["cpu"]
    at = torch.arange(42) * 2
    content = Plan(Positions(at), lookups=(Lookup(clip(3, 3), dot_query=leaf(H, 7, D)),))
    assert "not contiguous, and a term reads queries" in explain(q, k, v, content).reasons["cpu"]
    pair = Plan(Positions(42), pair=lambda p, r: (r[..., None, :] - p[..., :, None]).abs().double())
    assert explain(q, k, v, pair).engine == "cpu"
    assert "dropout" in explain(q, k, v, pair, dropout=0.1).reasons["cpu"]
    half = Plan(Positions(at), scale=leaf(H, 1), slopes=leaf(H))
    assert explain(*(x.bfloat16() for x in (q, k, v)), half).engine == "blocked"
