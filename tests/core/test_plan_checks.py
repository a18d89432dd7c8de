"""Wrong types in plans, calls and layers: one sentence that names the argument, and never an error from inside."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import posenc

POSITIONS = posenc.Positions(4)
CLIP = posenc.index.clip(1, 1)


def nested(*shapes: tuple[int, ...], layout=torch.strided):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype of PyTorch
        return torch.nested.nested_tensor([torch.zeros(shape) for shape in shapes], layout=layout)


JUNK = {
    "integer": 7, "float": 1.5, "text": "a", "list": [], "dict": {}, "object": object(), "NaN": float("nan"),
    "tensors": [torch.zeros(2)], "module": torch.nn.Linear(2, 2), "function": lambda a, b: a, "int64": torch.zeros(2).long(),
    "sparse": torch.zeros(3, 3).to_sparse(), "nested": nested((2,), (3,)), "jagged": nested((2,), (3,), layout=torch.jagged), "complex": torch.zeros(2).cfloat(),
    "mkldnn": torch.zeros(1, 2, 4, 8).to_mkldnn(), "float8": torch.zeros(1, 2, 4, 8).to(torch.float8_e4m3fn),
    "sparse4": torch.zeros(1, 2, 4, 8).to_sparse(), "sparse mask": torch.ones(1, 4).bool().to_sparse(),
    "nested4": nested((2, 4, 8)), "empty": torch.zeros(0), "meta": torch.zeros(2, device="meta"),
}  # fmt: skip
FIELDS = ("shift", "rotate", "cosine", "append", "lookups", "scale", "slopes", "decay", "pair", "sinks", "positions")
ALLOWED = {
    ("scale", "integer"), ("scale", "float"), ("lookups", "list"),
    ("window", "integer"), ("head_dim", "integer"),
}  # fmt: skip


def attend(plan=None, **given):
    x = torch.randn(1, 2, 4, 8)
    given = {"q": x, "k": x, "v": x} | given
    return posenc.attend(given.pop("q"), given.pop("k"), given.pop("v"), plan, **given)


def plan_with(states):
    return posenc.Plan(POSITIONS, lookups=(posenc.Lookup(CLIP, dot_query=torch.zeros(2, 3, 8), states=states),))


def expect_refusal(name: str, kind: str, call) -> None:
    if (name, kind) in ALLOWED:
        call()
        return
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_a_plan(name, kind):
    expect_refusal(name, kind, lambda: attend(posenc.Plan(**({"positions": POSITIONS} | {name: JUNK[kind]}))))


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize("name", ["index", "bias", "dot_query", "states", "dot_key", "add_value", "query_shift"])
def test_fields_of_a_lookup(name, kind):
    given = {"index": CLIP, name: JUNK[kind]}
    if name in ("states", "query_shift"):
        given["dot_query"] = torch.zeros(2, 3, 8)
    expect_refusal(name, kind, lambda: attend(posenc.Plan(POSITIONS, lookups=(posenc.Lookup(**given),))))


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize("name", ["q", "k", "v", "key_mask", "documents", "mask", "window", "causal"])
@pytest.mark.parametrize("encoding", ["none", "alibi", "rope"])
def test_arguments_of_attend(encoding, name, kind):
    plan = {"none": None, "alibi": posenc.ALiBi(heads=2), "rope": posenc.RoPE(head_dim=8)}[encoding]
    plan = None if plan is None else plan.plan(POSITIONS)
    expect_refusal(name, kind, lambda: attend(plan, **{name: JUNK[kind]}))


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize("name", ["x", "context", "positions", "mask", "key_mask", "documents", "memory", "cache"])
def test_arguments_of_a_layer(name, kind):
    layer = posenc.Attention(16, 2, encoding="t5")
    given = {"x": torch.randn(1, 4, 16), name: JUNK[kind]}
    expect_refusal(name, kind, lambda: layer(given.pop("x"), **given))


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize(
    "name", ["d_model", "heads", "kv_heads", "head_dim", "causal", "bias", "out_bias", "window", "encoding"]
)
def test_options_of_a_layer(name, kind):
    expect_refusal(
        name,
        kind,
        lambda: posenc.Attention(**({"d_model": 16, "heads": 2} | {name: JUNK[kind]}))(torch.randn(1, 4, 16)),
    )


@pytest.mark.parametrize("kind", JUNK)
@pytest.mark.parametrize("name", ["x", "cos", "sin", "layout", "parts", "part", "name"])
def test_arguments_of_other_functions(name, kind):
    phases = {"x": torch.randn(1, 2, 4, 8), "cos": torch.ones(4, 2), "sin": torch.zeros(4, 2)}
    calls = {
        "parts": lambda: posenc.merge(JUNK[kind]), "part": lambda: posenc.merge([JUNK[kind]]), "name": lambda: posenc.create(JUNK[kind]),
    }  # fmt: skip
    expect_refusal(name, kind, calls.get(name, lambda: posenc.apply_rotary(**(phases | {name: JUNK[kind]}))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: posenc.Plan(4), "positions=4 must be Positions: Positions(L)"),
        (lambda: posenc.Plan(POSITIONS, slopes=[1.0, 2.0]), "slopes must be a tensor, got [1.0, 2.0]"),
        (lambda: posenc.Plan(POSITIONS, slopes=torch.nn.Linear(2, 2)), "got the module Linear; give its weight"),
        (lambda: posenc.Plan(POSITIONS, lookups=posenc.Lookup(CLIP)), "give (lookup,)"),
        (lambda: posenc.Plan(POSITIONS, scale=float("inf")), "scale=inf must be finite"),
        (lambda: posenc.Plan(POSITIONS, scale=True), "scale=True must be a number"),
        (lambda: posenc.Plan(POSITIONS, decay=torch.zeros(2)), "decay=tensor([0., 0.]) must be two tensors"),
        (lambda: posenc.Plan(POSITIONS, pair=torch.zeros(4, 4)), "must be a function of positions"),
        (lambda: posenc.Plan(POSITIONS, rotate=(torch.zeros(2), torch.zeros(2))), "must be a Rotation"),
        (lambda: posenc.Lookup(1), "index=1 of a Lookup must be an Index or a Grid"),
        (lambda: posenc.Lookup(CLIP, bias=torch.zeros(2, 3).to_sparse()), "bias is of layout sparse_coo; give bias.to_dense()"),
        (lambda: attend(q=JUNK["float8"]), "q is torch.float8_e4m3fn, which attention cannot compute in; give q.to(torch.bfloat16)"),
        (lambda: attend(k=JUNK["nested4"]), "k is a nested tensor; pack the texts into one row with documents="),
        (lambda: attend(key_mask=JUNK["sparse mask"]), "key_mask is of layout sparse_coo; give key_mask.to_dense()"),
        (lambda: attend(causal=torch.zeros(2)), "causal=tensor([0., 0.]) must be True or False"),
        (lambda: attend(causal="yes"), "causal='yes' must be True or False"),
        (lambda: posenc.Attention(16, 2, causal="no"), "causal='no' must be True or False"),
        (lambda: posenc.Attention(16, 2, causal=None), "causal=None must be True or False"),
        (lambda: posenc.LatentAttention(16, 2, causal="no"), "causal='no' must be True or False"),
        (lambda: posenc.Attention(16, 2, kv_heads=1.0), "kv_heads=1.0 must be an integer"),
        (lambda: attend(plan_with(torch.tensor(1.0))), "states must have shape [1, 2, 4, 8], got []"),
    ],
)  # fmt: skip
def test_messages(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_other_truth_values():
    """0, 1 and a bool of numpy are as good as bools."""
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 8)
    expected = posenc.attend(x, x, x, causal=True)
    for causal in (1, numpy.bool_(True)):
        assert posenc.attend(x, x, x, causal=causal).equal(expected)
        assert posenc.Attention(16, 2, causal=causal).causal is True
    assert posenc.attend(x, x, x, causal=0).equal(posenc.attend(x, x, x))


def test_lists_of_terms_become_tuples():
    lookup = posenc.Lookup(CLIP, bias=torch.zeros(2, 3))
    assert posenc.Plan(POSITIONS, lookups=[lookup]).lookups == (lookup,)
