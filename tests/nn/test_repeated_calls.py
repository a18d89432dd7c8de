"""Calls without gradients use what the call before has worked out (engines/cpu/repeated_call.py): never a number that has changed since."""

import copy

import pytest
import torch

import posenc
from posenc.engines.cpu import dense, repeated_call

STEADY = ("alibi", "t5", "clipped", "shaw")
SIZE, HEADS = 32, 4


def make(name: str, heads: int = HEADS, **options) -> posenc.Attention:
    torch.manual_seed(0)
    layer = posenc.Attention(SIZE, heads, encoding=name, causal=True, **options).eval()
    with torch.no_grad():
        for parameter in layer.encoding.parameters():
            parameter.normal_()
    return layer


def by_reference(layer: posenc.Attention, x: torch.Tensor) -> torch.Tensor:
    layer.engine = "reference"
    try:
        return layer(x)
    finally:
        layer.engine = "auto"


class Steps:
    """Decodes a text and compares each token with the layer's output for the whole text so far."""

    def __init__(self, layer: posenc.Attention, past: int = 20, batch: int = 2, dtype=torch.float32, allowed=1e-5):
        self.layer, self.cache, self.allowed = layer, posenc.KVCache(), allowed
        self.text = torch.randn(batch, past + 40, SIZE, dtype=dtype)
        self.at = past
        with torch.no_grad():
            layer(self.text[:, :past], cache=self.cache)

    def check(self, count: int = 3) -> None:
        """Keys of earlier tokens are the cache's, so only changes of the encoding are compared."""
        for _ in range(count):
            self.at += 1
            with torch.no_grad():
                ours = self.layer(self.text[:, self.at - 1 : self.at], cache=self.cache)
                truth = by_reference(self.layer, self.text[:, : self.at])[:, -1:]
            torch.testing.assert_close(ours, truth, atol=self.allowed, rtol=self.allowed)


@pytest.fixture
def runs(monkeypatch):
    """Counts the steps that a Token has run, and those that it has refused."""
    return count_runs(monkeypatch, repeated_call.Token)


@pytest.fixture
def text_runs(monkeypatch):
    return count_runs(monkeypatch, repeated_call.Text)


def count_runs(monkeypatch, kind):
    counted = {"run": 0, "refused": 0}
    original = kind.run

    def run(self, *arguments):
        out = original(self, *arguments)
        counted["refused" if out is None else "run"] += 1
        return out

    monkeypatch.setattr(kind, "run", run)
    return counted


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float64, 1e-10), (torch.bfloat16, 0.05)])
def test_steps_equal_the_whole_text(name, options, dtype, allowed, runs):
    Steps(make(name, **options).to(dtype), dtype=dtype, allowed=allowed).check(8)
    if not (name == "shaw" and options):  # queries that share keys have other masks
        assert runs == {"run": 7, "refused": 0}


CHANGES = {
    "in place": lambda e: [p.mul_(-2.0) for p in e.parameters()],
    "through data": lambda e: [p.data.add_(1.0) for p in e.parameters()],
    "other storage": lambda e: [setattr(p, "data", p.data * 3.0) for p in e.parameters()],
    "other parameter": lambda e: [setattr(e, n, torch.nn.Parameter(p * -1.5)) for n, p in list(e._parameters.items())],
    "in the dictionary": lambda e: e._parameters.update({n: torch.nn.Parameter(p + 2.0) for n, p in e._parameters.items()}),
    "other scale": lambda e: setattr(e, "scale", 0.3) if hasattr(e, "scale") else None,
    "loaded": lambda e: e.load_state_dict({n: p + 1.0 for n, p in e.state_dict().items()}, assign=True),
}  # fmt: skip


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("change", list(CHANGES))
def test_no_change_of_an_encoding_is_overlooked(name, change, runs):
    layer = make(name)
    steps = Steps(layer)
    steps.check()
    with torch.no_grad():
        CHANGES[change](layer.encoding)
    steps.check()
    assert runs["run"] >= 4


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("causal", [False, True])
def test_texts_follow_every_change(name, change, causal, text_runs):
    torch.manual_seed(0)
    layer = posenc.Attention(SIZE, HEADS, encoding=name, causal=causal)
    x = torch.randn(2, 20, SIZE)

    def check():
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(layer(x), by_reference(layer, x), atol=1e-5, rtol=1e-5)

    check()
    with torch.no_grad():
        CHANGES[change](layer.encoding)
    check()
    layer.causal = not causal  # the encoding is another one's too
    check()
    trained = layer(x)
    trained.sum().backward()
    with torch.no_grad():
        assert torch.equal(layer(x), trained)
        late = x.clone()
        late[:, -1] = float("nan")
        torch.testing.assert_close(layer(late), by_reference(layer, late), atol=1e-5, rtol=1e-5, equal_nan=True)
    assert text_runs["run"] >= 6


def test_a_parametrized_table_is_made_anew(runs):
    layer = make("t5")
    factor = torch.nn.Parameter(torch.tensor(2.0))

    class Times(torch.nn.Module):
        def forward(self, table):
            return table * factor

    torch.nn.utils.parametrize.register_parametrization(layer.encoding, "table", Times())
    steps = Steps(layer)
    steps.check()
    with torch.no_grad():
        factor.fill_(-1.0)
    steps.check()
    assert runs["run"] == 0


def test_functional_call_uses_the_given_table():
    layer, cache = make("t5"), posenc.KVCache()
    x = torch.randn(1, 24, SIZE)
    with torch.no_grad():
        layer(x[:, :20], cache=cache)
        layer(x[:, 20:21], cache=cache)
        layer(x[:, 21:22], cache=cache)
        other = {"encoding.table": torch.randn_like(layer.encoding.table)}
        ours = torch.func.functional_call(layer, other, (x[:, 22:23],), {"cache": cache})
        truth = torch.func.functional_call(layer, other, (x[:, :23],))[:, -1:]
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)


def test_vectors_and_phases_of_the_call_before_follow_every_change():
    x = torch.randn(1, 8, SIZE)
    encoding = posenc.Sinusoidal(d_model=SIZE)
    kinds: list[dict] = [{}, {"base": 100.0}, {"layout": "concatenated"}]
    for options in kinds:
        for name, value in options.items():
            setattr(encoding, name, value)
        options = {"base": encoding.base, "layout": encoding.layout}
        for given, start in ((x, 0), (x.double(), 0), (x, 2048), (x, 2040), (x.bfloat16(), 1020)):
            positions = posenc.Positions((start, 8))
            truth = posenc.Sinusoidal(d_model=SIZE, **options).embed(given, positions)
            assert torch.equal(encoding.embed_run(given, start), truth)
    rope = posenc.create("rope", head_dim=8)
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    with torch.no_grad():
        for layout in ("half", "interleaved"):
            rope.layout = layout
            for start in (0, 5, 1024, 3):
                truth = (
                    posenc.create("rope", head_dim=8, layout=layout)
                    .rotation(posenc.Positions((start, 4)))
                    .rotate_qk(q, k)
                )
                for ours, exact in zip(rope.rotate_run(q, k, v, start)[:2], truth, strict=True):
                    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("name", ["t5", "shaw"])
def test_nan_is_reported(name):
    layer = make(name)
    steps = Steps(layer)
    steps.check()
    with torch.no_grad():
        next(layer.encoding.parameters()).view(-1)[0] = float("nan")
        with pytest.raises(ValueError, match="holds NaN"):
            layer(steps.text[:, steps.at : steps.at + 1], cache=steps.cache)


def test_layers_of_other_sizes_share_an_encoding(runs):
    encoding = make("alibi").encoding
    layers = [posenc.Attention(SIZE, HEADS, encoding=encoding, causal=True, head_dim=size).eval() for size in (8, 16)]
    several = [Steps(layer) for layer in layers]
    for _ in range(3):
        for steps in several:
            steps.check(1)
    assert runs["refused"] > 0


@pytest.mark.parametrize("name", STEADY)
def test_a_row_ends_and_another_begins(name, monkeypatch, runs):
    monkeypatch.setattr(dense, "STEP", 16)
    Steps(make(name), past=28).check(12)
    assert runs["run"] >= 9


def test_nan_over_few_keys_takes_the_long_way(runs, text_runs):
    """PyTorch's kernel hides NaN in a query over fewer keys than its vectors have numbers."""
    layer = make("t5")
    steps = Steps(layer, past=8)
    steps.check(3)
    assert runs["run"] > 0 and runs["refused"] == 0
    text = torch.randn(1, 5, SIZE)
    with torch.no_grad():
        token = torch.full((2, 1, SIZE), float("nan"))
        assert layer(token, cache=copy.copy(steps.cache)).isnan().all()
        for _ in range(3):
            layer(text)
        assert text_runs["run"] > 0
        assert layer(text.masked_fill(torch.arange(5)[:, None] == 2, float("nan"))).isnan().any(-1)[0, 2:].all()
    assert runs["refused"] > 0 and text_runs["refused"] > 0


def test_gradients_and_autocast_take_the_long_way(runs):
    layer = make("t5")
    steps = Steps(layer, past=8)
    steps.check(12)
    before = runs["run"]
    assert before > 0
    x = steps.text[:, steps.at : steps.at + 1]
    layer(x, cache=copy.copy(steps.cache)).sum().backward()
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match="autocast included"),
    ):
        layer(x, cache=copy.copy(steps.cache))
    assert runs["run"] == before


def test_terms_that_are_not_among_them_take_the_long_way(runs, text_runs):
    torch.manual_seed(0)
    layer = posenc.Attention(SIZE, HEADS, encoding=posenc.Shaw(head_dim=SIZE // HEADS, values=True), causal=True).eval()
    with torch.no_grad():
        for parameter in layer.encoding.parameters():
            parameter.normal_()
    Steps(layer).check(4)
    x = torch.randn(2, 20, SIZE)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(layer(x), by_reference(layer, x), atol=1e-5, rtol=1e-5)
    assert runs["run"] == text_runs["run"] == 0


def test_an_engine_that_is_registered_later_is_used():
    class Zeros:
        def supports(self, lowered):
            return None

        def run(self, q, k, v, lowered):
            return torch.zeros_like(q), None

    layer = make("t5")
    x = torch.randn(1, 20, SIZE)
    with torch.no_grad():
        for _ in range(2):
            assert layer(x).abs().sum() > 0
        engines = dict(posenc.ENGINES)
        posenc.register_engine("zeros", Zeros(), before="sdpa")
        try:
            posenc.ENGINES.update({"sdpa": Zeros(), "cpu": Zeros(), "triton": Zeros()})
            assert layer(x).abs().sum() == 0
        finally:
            posenc.ENGINES.clear()
            posenc.ENGINES.update(engines)


def test_a_subclass_with_terms_of_its_own_is_not_steady():
    class Other(posenc.ALiBi):
        def terms(self, positions, *, x=None, host=None):
            return posenc.Plan(positions, slopes=self.slopes_now())

        def slopes_now(self):
            return torch.rand(HEADS)

    assert posenc.ALiBi.steady_terms
    assert not Other.steady_terms


@pytest.mark.parametrize("name", STEADY)
def test_a_few_tokens_repeat_the_last_few(name, text_runs):
    layer, layers = make(name), []
    if name == "alibi":  # the encoding is shared, causality is not
        layers = [posenc.Attention(SIZE, HEADS, encoding=layer.encoding).eval()]
    for one in (layer, *layers):
        cache, text = posenc.KVCache(), torch.randn(2, 60, SIZE)
        with torch.no_grad():
            one(text[:, :20], cache=cache)
            for count in (4, 4, 4, 3, 4):
                if count == 3:
                    for parameter in layer.encoding.parameters():
                        parameter.add_(0.5)
                at = cache.length + count
                ours = one(text[:, at - count : at], cache=cache)
                truth = by_reference(one, text[:, :at])[:, -count:]
                torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    assert name == "shaw" or text_runs["run"] >= 2


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("causal", [False, True])
def test_padded_texts_follow_every_change(name, causal, text_runs):
    torch.manual_seed(0)
    layer = posenc.Attention(SIZE, HEADS, encoding=name, causal=causal)
    x, real, ids = torch.randn(2, 20, SIZE), torch.ones(2, 20, dtype=torch.bool), torch.zeros(2, 20, dtype=torch.long)

    def check(**masks):
        layer.engine = "reference"
        truth = layer(x, **masks)
        layer.engine = "auto"
        for _ in range(3):
            torch.testing.assert_close(layer(x, **masks), truth, atol=1e-5, rtol=1e-5, equal_nan=True)

    with torch.no_grad():
        for change in (
            lambda: real[1, 13:].fill_(False),
            lambda: [parameter.add_(0.5) for parameter in layer.encoding.parameters()],
            lambda: ids[:, 7:].fill_(3),
            lambda: real[0].fill_(False),  # fully masked
            lambda: x[1, 15].fill_(float("nan")),  # hidden
            lambda: real.fill_(True),
        ):
            change()
            check(key_mask=real)
            check(key_mask=real, documents=ids)
            check()
    assert text_runs["run"] >= 12


@pytest.mark.parametrize("name", STEADY)
def test_tokens_after_padded_texts_repeat_the_last_one(name, runs):
    layer = make(name)
    text, real = torch.randn(3, 60, SIZE), torch.arange(60) >= torch.tensor([0, 9, 20])[:, None]
    cache = posenc.KVCache()
    with torch.no_grad():
        layer(text[:, :30], key_mask=real[:, :30], cache=cache)
        for number in range(8):
            if number == 5:
                for parameter in layer.encoding.parameters():
                    parameter.add_(0.5)
            at = cache.length + 1
            ours = layer(text[:, at - 1 : at], cache=cache)
            layer.engine = "reference"
            truth = layer(text[:, :at], key_mask=real[:, :at])[:, -1:]
            layer.engine = "auto"
            torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    assert runs["run"] >= 5
