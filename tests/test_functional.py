"""attend, scores and merge: what they validate, and that attention over parts of the keys merges into the whole."""

import warnings

import pytest
import torch

import posenc
from posenc import Lookup, Plan, Positions, Rotation, UnsupportedPlan, index
from posenc.core.plan_checks import FEW, holds_nan
from posenc.engines import blocked
from tests.plans import plan_of, tensors


def test_without_a_plan_it_is_plain_attention():
    q, k, v = tensors(kv_heads=4)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(posenc.attend(q, k, v), expected)
    square = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True)
    torch.testing.assert_close(posenc.attend(q, k[:, :, :5], v[:, :, :5], causal=True), square)


def test_grouped_queries_are_those_of_pytorch():
    q, k, v = tensors(heads=6, kv_heads=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(posenc.attend(q, k, v), expected)


def test_scores_are_what_attend_softmaxes():
    q, k, v = tensors()
    plan = plan_of(("bias", "dot_key", "slopes"), q, k, v)
    s = posenc.scores(q, k, plan, causal=True, key_mask=torch.rand(2, 7) > 0.2)
    assert s.shape == (2, 4, 5, 7)
    assert torch.isneginf(s).any()
    s = posenc.scores(q, k, plan)
    out = s.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(posenc.attend(q, k, v, plan), out)


def test_shift_and_rotation_come_first():
    q, k, v = tensors(kv_heads=4)
    angle = torch.rand(1, 7, 3, dtype=torch.float64)
    phases = (angle.cos(), angle.sin())
    rotation = Rotation(q=tuple(p[:, 2:] for p in phases), k=phases)
    shift = torch.randn(4, 8, dtype=torch.float64)
    positions = Positions((2, 5), 7)
    ours = posenc.scores(q, k, Plan(positions, shift=shift, rotate=rotation))
    rotated = rotation.rotate_q(q + shift[:, None]) @ rotation.rotate_k(k).transpose(-1, -2)
    torch.testing.assert_close(ours, rotated * 8**-0.5)
    both = posenc.attend(q, k, v, Plan(positions, rotate=Rotation(rotation.q, phases, values=True)))
    torch.testing.assert_close(both, posenc.attend(q, k, rotation.rotate_k(v), Plan(positions, rotate=rotation)))


def test_engines_run_or_raise():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="'gpu' is unknown; use 'auto' or one of .*'reference'"):
        posenc.attend(q, k, v, engine="gpu")
    assert issubclass(UnsupportedPlan, NotImplementedError)
    assert list(posenc.ENGINES)[-1] == "reference"


def test_a_refusing_engine_says_why(monkeypatch):
    class Refuses:
        run = None

        @staticmethod
        def supports(lowered):
            return "it is Sunday"

    q, k, v = tensors()
    for name in posenc.ENGINES:
        monkeypatch.setitem(posenc.ENGINES, name, Refuses)
    with pytest.raises(UnsupportedPlan, match="engine 'reference' cannot run this: it is Sunday"):
        posenc.attend(q, k, v, engine="reference")
    with pytest.raises(UnsupportedPlan, match="reference: it is Sunday"):
        posenc.attend(q, k, v)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q, k, v: (q[0], k, v), r"q must be a tensor \[B, heads, L, D\], got \[4, 5, 8\]"),
        (lambda q, k, v: (q, [1], v), "k must be a tensor"),
        (lambda q, k, v: (q.long(), k, v), "floating point"),
        (lambda q, k, v: (q, k.float(), v), "q is torch.float64 and k is torch.float32"),
        (lambda q, k, v: (q, k, v.to("meta")), "q is on cpu and v on meta"),
        (lambda q, k, v: (q[:1], k, v), "1, 2 and 2 batch rows"),
        (lambda q, k, v: (q[..., :4], k, v), "head size 4 and k 8"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "same heads and length"),
        (lambda q, k, v: (q[:, :3], k, v), "q has 3 heads and k has 2; the number of query heads must be a multiple"),
    ],
)
def test_wrong_tensors_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        posenc.attend(*change(*tensors()))


def lookup(**tables):
    return (Lookup(index.clip(1, 1), **tables),)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda w: Plan(Positions(4, 7)),
            r"made for 4 queries and 7 keys, got 5 and 7; make it with Positions\(q=5, k=7\)",
        ),
        (lambda w: Plan(Positions(torch.zeros(3, 5, dtype=torch.int64), 7)), "3 rows, the batch has 2"),
        (
            lambda w: Plan(w, lookups=lookup(bias=torch.zeros(4, 2))),
            r"bias must have shape \[1 or 4, 3\], got \[4, 2\]",
        ),
        (lambda w: Plan(w, lookups=lookup(dot_query=torch.zeros(4, 3, 7))), r"dot_query must have shape"),
        (lambda w: Plan(w, lookups=lookup(dot_key=torch.zeros(2, 3, 8))), "made for 2 heads .*, q has 4"),
        (lambda w: Plan(w, lookups=lookup(add_value=torch.zeros(4, 3))), r"add_value must have shape"),
        (lambda w: Plan(w, lookups=lookup(bias=torch.full((4, 3), float("nan")))), "bias holds NaN"),
        (lambda w: Plan(w, lookups=lookup(bias=torch.zeros(4, 3, device="meta"))), "on meta and q on cpu"),
        (lambda w: Plan(w, lookups=lookup(bias=torch.zeros(4, 3, dtype=torch.int64))), "floating point"),
        (lambda w: Plan(w, lookups=(Lookup(index.clip(1, 1, axis=1), bias=torch.zeros(4, 3)),)), "reads axis 1"),
        (lambda w: Plan(w, slopes=torch.zeros(3)), "made for 3 heads .*, q has 4"),
        (lambda w: Plan(w, shift=torch.zeros(4, 7)), "shift must have shape"),
        (lambda w: Plan(w, scale=torch.zeros(3)), r"broadcast to \[B, H, Lq\] = \[2, 4, 5\], got shape \[3\]"),
        (lambda w: Plan(w, decay=(torch.zeros(2, 4, 5), torch.zeros(2, 4, 5))), r"decay\[1\] must have shape"),
        (lambda w: Plan(w, rotate=Rotation((torch.ones(1, 5, 5),) * 2, None)), "do not fit q"),
        (
            lambda w: Plan(w, rotate=Rotation((torch.ones(1, 5, 4),) * 2, None, layout="odd")),
            "'half' .* or 'interleaved'",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(make, words):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=words):
        posenc.attend(q, k, v, make(Positions((2, 5), 7)))


def test_states_need_a_table():
    with pytest.raises(ValueError, match="give dot_query too"):
        lookup(states=torch.zeros(1, 1, 1, 1))


@pytest.mark.parametrize(
    "masks, words",
    [
        (dict(dropout=1.0), "less than 1"),
        (dict(window=-1), "0 or more slots"),
        (dict(key_mask=torch.ones(2, 5, dtype=torch.bool)), r"\[B, Lk\] = \[2, 7\]"),
        (dict(key_mask=torch.ones(2, 7)), "boolean or 0/1 integers"),
        (dict(documents=torch.ones(2, 7).long()), r"query documents must be ids \[B, L\] = \[2, 5\]"),
        (dict(documents=torch.ones(2, 7)), "query documents must be int ids"),
        (dict(documents=(torch.ones(2, 5).long(),)), "a tuple of 1"),
        (dict(window=(1, 2, 3)), "has 3 numbers"),
        (dict(key_mask=torch.tensor([[0, -10000] * 3 + [0]] * 2)), "-10000 to 0; pass mask="),
        (dict(key_mask=torch.full((2, 7), 2)), "must be 0 .* or 1"),
        (dict(key_mask=torch.zeros(2, 7, dtype=torch.complex64)), "boolean or 0/1 integers"),
        (dict(dropout=True), "at least 0 and less than 1"),
        (dict(dropout="x"), "at least 0 and less than 1"),
        (dict(mask=torch.ones(2, 4, 5, 6, dtype=torch.bool)), r"= \[2, 4, 5, 7\], got \[2, 4, 5, 6\]"),
        (dict(mask=torch.ones(5, 7, dtype=torch.int64)), "boolean .* or floating point"),
        (dict(mask=torch.ones(5, 7, device="meta")), "mask is on meta"),
    ],
)
def test_wrong_masks_are_refused(masks, words):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=words):
        posenc.attend(q, k, v, **masks)


def test_a_decoding_query_at_the_wrong_position_warns():
    q, k, v = tensors(lq=1)
    encoding = posenc.ALiBi(heads=4)
    with pytest.warns(UserWarning, match=r"Positions\(q=\(6, 1\), k=\(0, 7\)\)"):
        posenc.attend(q, k, v, encoding.plan(Positions(1, 7)), causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posenc.attend(q, k, v, encoding.plan(Positions((6, 1), 7)), causal=True)
        posenc.attend(q, k, v, causal=True)


def test_nan_in_the_input_comes_out_and_stays_in_its_row():
    q, k, v = tensors()
    q[1, 2, 3] = float("nan")
    out = posenc.attend(q, k, v)
    assert torch.isnan(out[1, 2, 3]).all()
    assert torch.isnan(out).sum() == 8


@pytest.mark.parametrize("length", [8, 3 * FEW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_one_nan_is_found_among_few_numbers_and_many(length, dtype):
    numbers = torch.linspace(-1e4, 1e4, length).to(dtype)
    numbers[0], numbers[1] = float("inf"), float("-inf")  # their sum is NaN
    for given in (numbers, numbers.view(2, -1).t(), numbers.clone().requires_grad_(), numbers[:0]):
        assert not holds_nan(given)
    numbers[length // 2] = float("nan")
    assert holds_nan(numbers)
    assert holds_nan(numbers.view(2, -1).t())
    assert holds_nan(numbers.clone().requires_grad_())
    assert not holds_nan(numbers[: length // 2])


def test_a_plan_is_checked_within_one_graph():
    """Also on devices whose numbers are not looked at."""
    q = torch.empty(1, 2, 8, 16, device="meta")
    plan = Plan(Positions(8, 8), slopes=torch.ones(2, device="meta"))
    run = torch.compile(lambda x: (plan.check(x, x, x), x + 1)[1], fullgraph=True, backend="eager")
    assert run(q).shape == q.shape


def test_an_encoding_is_no_plan():
    q = torch.randn(2, 4, 5, 8)
    encoding = posenc.T5(heads=4)
    for call in (posenc.attend, posenc.explain):
        with pytest.raises(TypeError, match=r"got the encoding T5; give plan=encoding.plan\(Positions\(q=5, k=5\)\)"):
            call(q, q, q, encoding)
    with pytest.raises(TypeError, match="got the encoding T5"):
        posenc.scores(q, q, encoding)
    with pytest.raises(TypeError, match="must be a Plan.*got Positions"):
        posenc.attend(q, q, q, Positions(5))


def test_lengths_and_heads_the_wrong_way_round():
    q = torch.randn(2, 5, 4, 8)  # [B, L, H, D]
    with pytest.raises(ValueError, match=r"look like \[B, L, H, D\]: give \[B, H, L, D\]"):
        posenc.attend(q, q, q, posenc.T5(heads=4).plan(Positions(5)))
    with pytest.raises(ValueError, match=r"made for 4 heads .*, q has 5; make it with heads=5.*transpose\(1, 2\)"):
        posenc.attend(q, q, q, posenc.T5(heads=4).plan(Positions(4)))


@pytest.mark.parametrize("name", ["t5", "clipped", "alibi", "transformer_xl", "deberta"])
def test_heads_that_differ(name):
    plan = posenc.create(name, d_model=64, heads=8, head_dim=8).plan(Positions(5))
    q = torch.randn(1, 12, 5, 8)
    with pytest.raises(ValueError, match="the encoding was made for 8 heads .*, q has 12; make it with heads=12"):
        posenc.attend(q, q, q, plan)


@pytest.mark.parametrize(
    "shape, fits",
    [((2, 4, 5, 7), True), ((1, 4, 5, 7), True), ((1, 1, 5, 7), True), ((4, 5, 7), True), ((5, 7), True),
     ((2, 4, 5, 1), False), ((2, 4, 1, 7), False), ((2, 4, 7, 5), False), ((2, 5, 7), False), ((3, 4, 5, 7), False),
     ((7,), False), ((), False), ((1, 2, 4, 5, 7), False)],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_what_pair_returns_has_the_shape_of_the_pairs(shape, fits, engine):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    plan = Plan(Positions(5, 7), pair=lambda p_q, p_k: torch.ones(shape))
    if fits:
        torch.testing.assert_close(posenc.attend(q, k, k, plan, engine=engine), posenc.attend(q, k, k))
    else:
        with pytest.raises(ValueError, match=r"pair must return .*\[B or 1, H or 1, lq, lk\] = \[2, 4, 5, 7\]"):
            posenc.attend(q, k, k, plan, engine=engine)
    with pytest.raises(TypeError, match="got float"):
        posenc.attend(q, k, k, Plan(Positions(5, 7), pair=lambda p_q, p_k: 0.0), engine=engine)


@pytest.mark.parametrize("window", [2.5, True, "x", (1, 2.5), (None, True), torch.tensor(3), (torch.tensor(3), None)])
def test_windows_that_are_none(window):
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(TypeError, match="must be an integer, or"):
        posenc.attend(q, q, q, window=window)


@pytest.mark.parametrize(
    "masks", [dict(documents=[[0, 0, 1, 1, 1]] * 2), dict(key_mask=[[True] * 5] * 2), dict(mask=[[1.0] * 5] * 5),
              dict(documents=([0], [1]))],
)  # fmt: skip
def test_lists_are_no_masks(masks):
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(TypeError, match=f"{next(iter(masks))} must be .*, got list"):
        posenc.attend(q, q, q, **masks)


@pytest.mark.parametrize("mask", [torch.tensor([[0.0, -1e4]]), torch.tensor([[0.0, -torch.inf]]), torch.ones(1, 2)])
def test_a_float_key_mask_is_refused_everywhere(mask):
    """0 for real keys and -10000 for padding would be read in reverse."""
    q, x = torch.randn(1, 4, 2, 4), torch.randn(1, 2, 16)
    layer = posenc.Attention(16, 4)
    rope = posenc.RoPE(head_dim=4)
    for call in (
        lambda: posenc.attend(q, q, q, key_mask=mask),
        lambda: posenc.scores(q, q, key_mask=mask),
        lambda: layer(x, key_mask=mask),
        lambda: layer(x, key_mask=mask, cache=posenc.KVCache()),
        lambda: layer(x, x, key_mask=mask),
        lambda: posenc.rope.self_extend(q, q, q, rope=rope, group=1, window=2, key_mask=mask),
        lambda: posenc.rope.rerope(q, q, q, rope=rope, window=2, key_mask=mask),
        lambda: posenc.rope.dual_chunk(q, q, q, rope=rope, chunk_size=4, local=1, key_mask=mask),
    ):
        with pytest.raises(ValueError, match="boolean or 0/1 integers .*; pass mask= for additive masks"):
            call()


def test_an_integer_key_mask_is_zero_or_one():
    q, x = torch.randn(1, 4, 2, 4), torch.randn(1, 2, 16)
    layer = posenc.Attention(16, 4)
    real = torch.tensor([[1, 0]])
    assert torch.equal(posenc.attend(q, q, q, key_mask=real), posenc.attend(q, q, q, key_mask=real.bool()))
    assert torch.equal(layer(x, key_mask=real), layer(x, key_mask=real.bool()))
    for wrong in (torch.tensor([[0, -10000]]), torch.tensor([[1, 2]])):
        for call in (lambda wrong=wrong: posenc.attend(q, q, q, key_mask=wrong),
                     lambda wrong=wrong: layer(x, key_mask=wrong)):  # fmt: skip
            with pytest.raises(ValueError, match="must be 0 .* or 1"):
                call()


# ---- return_lse and merge ----
ENGINES = ("reference", "cpu", "blocked")


@pytest.mark.parametrize("engine", ENGINES)
def test_lse_is_of_the_scores(engine, monkeypatch):
    monkeypatch.setattr(blocked, "FEWEST", 3)  # several blocks of queries
    monkeypatch.setattr(blocked, "SCORES", 1)
    q, k, v = (x.requires_grad_() for x in tensors(lq=10, lk=12))
    plan = plan_of(("bias", "dot_query", "add_value", "decay"), q, k, v)
    out, lse = posenc.attend(q, k, v, plan, causal=True, engine=engine, return_lse=True)
    s = posenc.scores(q, k, plan, causal=True)
    torch.testing.assert_close(out, posenc.attend(q, k, v, plan, causal=True, engine="reference"))
    torch.testing.assert_close(lse, s.logsumexp(-1))
    g = torch.randn_like(lse)
    ours, theirs = (torch.autograd.grad(x, (q, k), g, retain_graph=True) for x in (lse, s.logsumexp(-1)))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_merge_into_the_whole(engine):
    q, k, v = (x.requires_grad_() for x in tensors(lq=6, lk=20))
    k.data[0, 0, 3] = 9.0  # one part far above the others
    table = torch.randn(4, 41, dtype=torch.float64).requires_grad_()
    mask = torch.rand(2, 20) > 0.3
    mask[1] = False  # a fully masked batch row

    def plan(begin, length):
        return Plan(Positions((14, 6), (begin, length)), lookups=(Lookup(index.clip(20, 20), bias=table),))

    whole = posenc.attend(q, k, v, plan(0, 20), key_mask=mask, engine=engine)
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 20), (20, 20)):
        at = slice(begin, end)
        name = engine if begin < end else "auto"  # the cpu engine takes no empty tensors
        part = (q, k[:, :, at], v[:, :, at], plan(begin, end - begin))
        parts.append(posenc.attend(*part, key_mask=mask[:, at], engine=name, return_lse=True))
    out, lse = posenc.merge(parts)
    torch.testing.assert_close(out, whole)
    assert (lse[1] == float("-inf")).all() and lse[0].isfinite().all() and not out[1].any()
    g = torch.randn_like(out)
    leaves = (q, k, v, table)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, g), torch.autograd.grad(whole, leaves, g))


def test_parts_that_do_not_fit_are_refused():
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    with pytest.raises(ValueError, match="at least one"):
        posenc.merge([])
    with pytest.raises(ValueError, match=r"all alike, got \[\(\[1, 2, 3, 4\], \[1, 2, 3\]\), \(\[1, 2, 2, 4\]"):
        posenc.merge([(out, lse), (out[:, :, :2], lse[:, :, :2])])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"is_causal": True}, "is_causal: give causal"),
        ({"attn_mask": torch.zeros(4, 4)}, "attn_mask: give mask"),
        ({"enable_gqa": True}, "enable_gqa: leave it out"),
        ({"colour": 1, "dropout_p": 0.1}, "colour: the masks are causal, window, key_mask, documents, mask; .* dropout_p: give"),
    ],
)  # fmt: skip
def test_arguments_of_other_attention_functions_are_named(given, words):
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    for plan in (None, posenc.create("t5", heads=2).plan(Positions(4))):
        for call in (posenc.attend, posenc.explain):
            with pytest.raises(TypeError, match=words):
                call(q, k, v, plan, **given)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_phases_without_a_batch_serve_every_head(layout):
    x, angle = torch.randn(2, 3, 5, 8), torch.randn(5, 4)
    out = posenc.apply_rotary(x, angle.cos(), angle.sin(), layout)
    assert torch.equal(out, posenc.apply_rotary(x, angle.cos()[None], angle.sin()[None], layout))
    assert torch.equal(out[:, :1], posenc.apply_rotary(x[:, :1], angle.cos(), angle.sin(), layout))


@pytest.mark.parametrize(
    ("shape", "layout", "words"),
    [
        ((5, 4), "neox", "layout must be 'half' .* or 'interleaved' .*, got 'neox'"),
        ((1, 5, 8), "half", r"at most 4\]; if each phase stands there twice, give cos\[..., :4\]"),
        ((6, 4), "half", r"\[1, 6, 4\] do not fit x of shape \[2, 3, 5, 8\]"),
        ((1, 2, 5, 4), "half", "phases are for 2 heads, x has 3"),
        ((5,), "half", "cos and sin must both be"),
    ],
)
def test_phases_that_do_not_fit_are_refused(shape, layout, words):
    with pytest.raises(ValueError, match=words):
        posenc.apply_rotary(torch.randn(2, 3, 5, 8), torch.ones(shape), torch.ones(shape), layout)
    with pytest.raises(ValueError, match=r"x must be \[B, H, L, D\], got \[5, 8\]"):
        posenc.apply_rotary(torch.randn(5, 8), torch.ones(5, 4), torch.ones(5, 4))


def test_reprs_show_what_is_set():
    positions = Positions(4)
    plan = posenc.create("t5", heads=2).plan(positions)
    assert repr(plan) == (
        f"Plan(positions={positions!r}, lookups=(Lookup(index=Index(lo=-91, hi=91, rows=(15, 14, 14, … 177 more …, 30, 30, 31), "
        "n=32), bias=float32 [2, 32]),), scale=1.0)"
    )
    assert repr(posenc.Mask(causal=True)) == "Mask(causal=True)"
    assert repr(posenc.Index(-1, 1)) == "Index(lo=-1, hi=1, n=3)"
    rotation = posenc.create("rope", head_dim=4).rotation(positions)
    assert (
        repr(rotation) == "Rotation(q=(float32 [1, 4, 2], float32 [1, 4, 2]), k=(float32 [1, 4, 2], float32 [1, 4, 2]))"
    )
    layer = posenc.Attention(32, 4, kv_heads=2, causal=True, dropout=0.5)
    assert repr(layer).splitlines()[1].strip() == "32, heads=4, kv_heads=2, causal=True, dropout=0.5"


def test_a_class_and_a_name_with_options_are_named_as_such():
    with pytest.raises(TypeError, match="got the class T5; give an object or a name"):
        posenc.Attention(32, 4, encoding=posenc.T5)
    with pytest.raises(ValueError, match=r"give options as arguments: create\('t5', buckets=64\)"):
        posenc.Attention(32, 4, encoding="t5:buckets=64")


def test_a_layer_refuses_a_window_when_it_is_made():
    with pytest.raises(ValueError, match="window=-3 must be 0 or more slots"):
        posenc.Attention(32, 4, window=-3)


@pytest.mark.parametrize(("junk", "words"), [({"dropout": torch.zeros(3)}, "dropout"), ({"engine": []}, "engine")])
def test_options_of_another_type_are_named(junk, words):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=words):
        posenc.attend(q, q, q, **junk)
