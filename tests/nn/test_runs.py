"""The short ways of a layer on a CPU (consecutive tokens, no masks): the same numbers as the long ones, at every place."""

import pytest
import torch
from torch import nn

import posenc
from posenc import Attention, KVCache, Lookup, Plan, Positions, index
from posenc.bench.uses_layers import BY_HAND, make_layer
from posenc.core.encoding import Encoding
from posenc.core.memo import STEP
from posenc.engines import plain_call
from posenc.engines.cpu import dense


@pytest.mark.parametrize("start", [0, 5, STEP - 3, STEP - 1, STEP, 3 * STEP + 7])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("gradient", [False, True])
def test_runs_have_the_numbers_of_their_positions(start, length, gradient):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 16).unbind()
    x = torch.randn(2, length, 64)
    at = Positions((start, length))
    with torch.set_grad_enabled(gradient):
        for name in ("rope", "xpos"):
            encoding = posenc.create(name, head_dim=16)
            for ours, truth in zip(
                encoding.rotate_run(q, k, v, start), encoding.rotation(at).rotate_qkv(q, k, v), strict=True
            ):
                assert torch.equal(ours, truth)
        few = posenc.create("rope", head_dim=16).rotate_run(q, k[:, :2], v, start)  # heads that share keys
        assert torch.equal(few[1], posenc.create("rope", head_dim=16).rotate_run(q, k, v, start)[1][:, :2])
        for encoding in (posenc.Sinusoidal(d_model=64), posenc.Learned(max_length=4 * STEP, d_model=64, offset=2)):
            assert torch.equal(encoding.embed_run(x, start), encoding.embed(x, at))


def test_a_run_past_the_end_of_learned_positions_raises():
    layer = Attention(64, 4, encoding=posenc.Learned(max_length=8, d_model=64), causal=True)
    with pytest.raises(ValueError, match="end at max_length=8"):
        layer(torch.randn(1, 9, 64))


def test_an_encoding_with_embed_or_rotation_of_its_own_is_asked():
    class Twice(posenc.Learned):
        def embed(self, x, positions):
            return 2.0 * super().embed(x, positions)

    class Still(posenc.RoPE):
        def rotation(self, positions):
            return super().rotation(Positions(torch.zeros(positions.q_length, dtype=torch.int64)))

    x = torch.randn(1, 4, 64)
    twice = Twice(max_length=8, d_model=64)
    assert torch.equal(twice.embed_run(x, 1), 2.0 * (x + twice.table[1:5]))
    q = torch.randn(1, 2, 3, 16)
    with torch.no_grad():
        assert torch.equal(Still(head_dim=16).rotate_run(q, q, q, 5)[0], q)


@pytest.mark.parametrize("name", list(BY_HAND))
def test_outputs_have_the_same_bits_with_and_without_gradients(name):
    layer = make_layer(name, name not in ("t5", "shaw", "deberta"), "cpu", torch.float32, 40)
    x = torch.randn(2, 40, 512)
    with torch.no_grad():
        plain = layer(x)
    assert torch.equal(layer(x), plain)


def terms(kind: str, heads: int = 4, size: int = 8, batch: int = 2, length: int = 20) -> Plan:
    generator = torch.Generator().manual_seed(1)

    def table(*shape):
        return torch.randn(*shape, generator=generator, requires_grad=True)

    rows = index.clip(3, 2)
    extra = {
        "states": {"states": table(batch, heads, length, 5)},
        "query_shift": {"query_shift": table(heads, size)},
    }.get(kind, {})
    lookup = Lookup(
        rows, dot_query=table(heads if kind != "shared" else 1, rows.n, 5 if kind == "states" else size), **extra
    )
    more = (Lookup(index.clip(2, 2), bias=table(heads, 5)),) if kind == "bias" else ()
    return Plan(
        Positions(length), lookups=(lookup, *more), shift=table(heads, size) if kind == "shift" else None,
        slopes=table(heads) if kind == "slopes" else None, scale=0.3 if kind == "scale" else None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "shared", "states", "query_shift", "shift", "bias", "slopes", "scale"])
@pytest.mark.parametrize("causal", [False, True])
def test_tables_for_queries_are_those_of_the_reference_with_their_gradients(kind, causal):
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 4, 20, 8).unbind())
    plan = terms(kind)
    leaves = [q, k, v, *(x for _, x in plan.tensors()), *([plan.shift] if plan.shift is not None else [])]
    assert plain_call.run(q, k, v, plan, causal) is not None
    found = []
    for engine in ("auto", "reference"):
        out = posenc.attend(q, k, v, plan, causal=causal, engine=engine)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-4, rtol=1e-4)


def test_a_table_with_nan_takes_the_way_that_says_so():
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    table = torch.randn(2, 6, 8)
    table[0, 1, 2] = float("nan")
    for queries in (1, 20):
        plan = Plan(Positions((20 - queries, queries), 20), lookups=(Lookup(index.clip(3, 2), dot_query=table),))
        with torch.no_grad(), pytest.raises(ValueError, match="holds NaN"):
            posenc.attend(q[:, :, :queries], k, v, plan)


def test_modules_and_hooks_in_a_projections_place_get_texts():
    layer = Attention(64, 4, encoding="rope", causal=True)
    x = torch.randn(2, 5, 64)
    truth = layer(x)
    shapes = []
    layer.k_proj.register_forward_pre_hook(lambda module, given: shapes.append(tuple(given[0].shape)))
    layer.o_proj = nn.Sequential(layer.o_proj)
    torch.testing.assert_close(layer(x), truth)
    assert shapes == [(2, 5, 64)]


def test_a_first_call_makes_the_same_graph_as_the_next():
    """Checkpointing counts saved tensors: what is kept must not change them."""
    layer, x = Attention(64, 4, encoding="alibi", causal=True), torch.randn(1, 30, 64, requires_grad=True)
    dense._masks.clear()
    names = []
    for _ in range(2):
        node = layer(x).grad_fn
        while node is not None and len(names) < 99:
            names.append(node.name())
            node = next((one for one, _ in node.next_functions if one is not None), None)
        names.append("end")
    half = len(names) // 2
    assert names[:half] == names[half:]


def test_a_shift_comes_before_the_rotation_in_every_step():
    class Both(Encoding):
        def __init__(self):
            super().__init__()
            self.rope = posenc.RoPE(head_dim=16)
            self.shift = nn.Parameter(torch.randn(4, 16))

        def rotation(self, positions):
            return self.rope.rotation(positions)

        def terms(self, positions, *, x=None, host=None):
            return Plan(positions, shift=self.shift)

    layer, cache = Attention(64, 4, encoding=Both(), causal=True), KVCache()
    x = torch.randn(1, 7, 64)
    with torch.no_grad():
        parts = [layer(x[:, :5], cache=cache), layer(x[:, 5:6], cache=cache), layer(x[:, 6:], cache=cache)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-5, rtol=1e-5)
