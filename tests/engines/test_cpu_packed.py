"""Packed documents on a CPU, each as a call of its own, against the reference."""

import pytest
import torch

import posenc
from posenc.core.index import Grid, clip, exact
from posenc.core.mask import Mask
from posenc.core.plan import Lookup, Plan
from posenc.core.positions import Positions
from posenc.engines.cpu import packed
from posenc.functional import attend, explain

B, H, L, D = 3, 4, 40, 8
SIZES = [[40], [7, 1, 20, 12], [25, 15]]


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def pack(sizes=SIZES):
    return torch.stack([torch.repeat_interleave(torch.randperm(len(own)), torch.tensor(own)) for own in sizes])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(packed, "LEAST", 1)
    monkeypatch.setattr(packed, "PIECE", 0)


def plans():
    at = torch.arange(L)
    starts = torch.tensor([0, 5, 2])
    restarting = torch.stack([torch.cat([torch.arange(n) for n in own]) for own in SIZES])
    jumps = torch.stack([torch.randperm(L) for _ in range(B)])
    one = Positions(L)
    patches = Positions(L, more=[(at // 8, at // 8), (at % 8, at % 8)])
    grid = Grid((clip(4, 4, axis=1), clip(7, 7, axis=2)))
    states = leaf(B, H, L, 5)
    return {
        "none": Plan(one),
        "bias": Plan(one, lookups=(Lookup(clip(3, 3), bias=leaf(H, 7)),)),
        "every distance": Plan(one, lookups=(Lookup(exact(one), dot_query=leaf(H, 2 * L - 1, D)),)),
        "keys and values": Plan(
            one, lookups=(Lookup(clip(5, 2), dot_query=leaf(1, 8, D), dot_key=leaf(H, 8, D), add_value=leaf(1, 8, D)),)
        ),
        "states": Plan(one, lookups=(Lookup(clip(3, 3), dot_query=leaf(H, 7, 5), states=states),), scale=0.3),
        "slopes": Plan(Positions((starts, L)), slopes=leaf(H)),
        "decay": Plan(one, decay=(leaf(B, H, L), leaf(B, H, L))),
        "shared decay": Plan(one, decay=(leaf(1, H, L), leaf(1, H, L)), sinks=leaf(H)),
        "scale of each token": Plan(one, scale=leaf(B, 1, L), slopes=leaf(H)),
        "scale of each head": Plan(one, scale=leaf(H, 1), lookups=(Lookup(clip(3, 3), bias=leaf(H, 7)),)),
        "restarting": Plan(Positions(restarting), lookups=(Lookup(clip(9, 9), dot_query=leaf(H, 19, D)),)),
        "jumps": Plan(Positions(jumps), lookups=(Lookup(clip(9, 9), bias=leaf(H, 19)),)),
        "patches": Plan(patches, lookups=(Lookup(grid, bias=leaf(H, grid.n)), Lookup(clip(2, 2), bias=leaf(1, 5)))),
        "sinks": Plan(one, sinks=leaf(H), slopes=leaf(H)),
    }  # fmt: skip


MASKS = {
    "open": {},
    "causal": dict(causal=True),
    "window": dict(window=(6, 2)),
    "padding": dict(causal=True, key_mask=torch.arange(L) < torch.tensor([[L], [L - 9], [30]])),
    "shared padding": dict(key_mask=torch.arange(L)[None] % 5 > 0),
}


def compare(q, k, v, plan, **options):
    leaves = [q, k, v, *(x for _, x in plan.tensors())]
    assert explain(q, k, v, plan, **options).engine == "cpu"
    for return_lse in (False, True):
        found = []
        for engine in ("auto", "reference"):
            results = attend(q, k, v, plan, engine=engine, return_lse=return_lse, **options)
            out, lse = results if return_lse else (results, torch.zeros(()))
            loss = out.cos().sum() + lse.masked_fill(lse.isneginf(), 0.0).cos().sum()
            found.append([out, lse, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("masked", list(MASKS))
@pytest.mark.parametrize("name", list(plans()))
def test_equals_the_reference(name, masked):
    q, k, v = (leaf(B, heads, L, D) for heads in (H, H, H))
    documents = pack()
    assert packed.find(Mask(documents=(documents, documents)), B, H, L, L) is not None
    compare(q, k, v, plans()[name], documents=documents, **MASKS[masked])


@pytest.mark.parametrize("name", ["none", "bias", "keys and values", "decay"])
def test_shared_documents_and_heads(name):
    """One row of ids for all texts; keys for several heads."""
    plan, kv_heads = plans()[name], H if "keys" in name else 2
    q, k, v = (leaf(B, heads, L, D) for heads in (H, kv_heads, kv_heads))
    ids = pack()[1:2]
    compare(q, k, v, plan, documents=ids, causal=True)
    compare(q, k, v, plan, documents=(ids, ids.clone()), causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_training(dtype):
    """Positions restart in each document; the same as without the shortcut, and as each document alone."""
    for encoding in ("rope", "t5", "shaw", "sinusoidal", "deberta", "transformer_xl"):
        torch.manual_seed(0)
        layer = posenc.Attention(16, 4, encoding=encoding, causal=True).to(dtype)
        x = torch.randn(B, L, 16, dtype=dtype)
        ids = pack()
        out = layer(x, documents=ids)
        for row, sizes in enumerate(SIZES):
            alone = torch.cat([layer(part[None])[0] for part in x[row].split(sizes)])
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(out[row], alone, atol=tolerance, rtol=tolerance)


def test_what_is_not_in_pieces_or_not_worth_it(monkeypatch):
    def find(*documents, q_length=L, **mask):
        both = (documents[0], documents[-1])
        return packed.find(Mask(documents=both, **mask), 1, H, q_length, both[1].shape[1])

    ids = pack()[1:2]
    assert find(ids)[0].sizes == SIZES[1]
    assert find(torch.zeros(1, L).long()) is None, "one document is the whole text"
    assert find((torch.arange(L) % 2)[None]) is None, "two documents in turns"
    assert find(ids, ids.flip(1)) is None, "other documents of keys"
    assert find(ids[:, :9], ids, q_length=9) is None, "the last tokens of a text"
    assert find(ids, extra=torch.zeros(1, 1, L, L)) is None
    monkeypatch.setattr(packed, "PIECE", 1 << 10)
    assert find(ids) is None, "four calls cost more than they save"
    monkeypatch.setattr(packed, "LEAST", H * L * L + 1)
    monkeypatch.setattr(packed, "PIECE", 0)
    assert find(ids) is None, "a short text"


@pytest.mark.parametrize("name", ["none", "keys and values"])
def test_another_document_does_not_reach_the_output(name):
    plan, ids = plans()[name], pack()
    q, k, v = (leaf(B, H, L, D) for _ in range(3))
    with torch.no_grad():
        before = attend(q, k, v, plan, causal=True, documents=ids)
        first = torch.arange(L) < 7
        for x in (q, k, v):
            x[1, :, :7] = torch.nan
        after = attend(q, k, v, plan, causal=True, documents=ids)
    assert torch.equal(after[1][:, ~first], before[1][:, ~first])
    assert after[1][:, :7].isnan().all()
    assert torch.equal(after[::2], before[::2])


@pytest.mark.parametrize(
    "documents",
    [
        torch.zeros(L),
        torch.zeros(2, L).long(),
        torch.zeros(B, L + 1).long(),
        torch.zeros(B, L, device="meta").long(),
        "ids",
        (1, 2, 3),
    ],
)
def test_invalid_documents_are_explained(documents):
    q, k, v = (leaf(B, H, L, D) for _ in range(3))
    with pytest.raises((ValueError, TypeError), match="documents"):
        attend(q, k, v, documents=documents)


def test_nothing_of_the_size_of_the_text_is_computed():
    q, k, v = (torch.randn(1, H, 400, D, requires_grad=True) for _ in range(3))
    ids = (torch.arange(400) // 50)[None]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        attend(q, k, v, plans_of(400), causal=True, documents=ids)
    assert max(sizes) <= H * 400 * D


def plans_of(length):
    return Plan(Positions(length), lookups=(Lookup(clip(9, 9), dot_query=torch.randn(H, 19, D, requires_grad=True)),))


def test_dropout_and_functions_of_positions_count_tokens_of_the_whole_text(monkeypatch):
    """They draw, and read positions, where they did before."""
    q, k, v = (leaf(B, H, L, D) for _ in range(3))
    pair = Plan(Positions(L), pair=lambda p_q, p_k: (p_k - p_q[:, None]).double().cos() * p_q[:, None])
    ids = pack()
    both = [attend(q, k, v, pair, documents=ids, engine=engine) for engine in ("auto", "reference")]
    torch.testing.assert_close(*both, atol=1e-10, rtol=1e-10)
    found = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(packed, "LEAST", least)
        torch.manual_seed(3)
        found.append(attend(q, k, v, documents=ids, dropout=0.3))
    assert torch.equal(*found)
