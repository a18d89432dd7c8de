"""torch.export and ONNX take a layer as it is: every length, plain operators, the same numbers."""

import functools
import io
from contextlib import redirect_stdout

import pytest
import torch

import posenc
from tests.encodings.every import BOTH_SIDES, LIMITS, NAMES, layer

FORMS = [(name, causal) for name in NAMES for causal in (True, False) if causal or name in BOTH_SIDES]
LONGEST = {name: min(LIMITS.get(name, 4096), 4096) for name in NAMES}
ONNX_TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # PyTorch's ONNX exporter copies one


@functools.cache
def sizes(longest):
    return torch.export.Dim("batch", max=4096), torch.export.Dim("length", min=2, max=longest)


def masked(length, rows=2):
    """States, and padding on the left, on the right and in the middle."""
    key_mask = torch.ones(rows, length, dtype=torch.bool)
    key_mask[0, : length // 3] = False
    key_mask[-1, -(length // 4) :] = False
    key_mask[-1, length // 2] = False
    return torch.randn(rows, length, 16), key_mask


class Masked(torch.nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x, key_mask):
        return self.attn(x), self.attn(x, key_mask=key_mask)


def exported(name, causal, length=10):
    model = Masked(layer(name, causal=causal).eval())
    batch, tokens = sizes(LONGEST[name])
    open_sizes = {"x": {0: batch, 1: tokens}, "key_mask": {0: batch, 1: tokens}}
    return model, torch.export.export(model, masked(length), dynamic_shapes=open_sizes)


def operators(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def largest_difference(found, wanted):
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def check_lengths(model, program, lengths=(7, 16)):
    assert not any("posenc" in one for one in operators(program))
    module = program.module()
    for rows, length in enumerate(lengths, 1):
        given = masked(length, rows)
        assert largest_difference(module(*given), model(*given)) < 1e-6


QUICK = ["rope", "t5", "deberta", "transformer_xl"]


@pytest.mark.parametrize("name", QUICK)
def test_every_length(name):
    check_lengths(*exported(name, True))


@pytest.mark.slow
@pytest.mark.parametrize("name, causal", [form for form in FORMS if form[0] not in QUICK or not form[1]])
def test_every_length_of_every_encoding(name, causal):
    check_lengths(*exported(name, causal))


def onnx_session(program):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with redirect_stdout(io.StringIO()):  # its progress
        made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert {node.domain for node in made.model_proto.graph.node} <= {"", "pkg.torch.onnx"}
    return onnxruntime.InferenceSession(made.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])


def run_onnx(session, *given):
    names = [one.name for one in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
    return [torch.from_numpy(one) for one in found]


def check_onnx(name, causal):
    model, program = exported(name, causal)
    session = onnx_session(program)
    for length in (7, 16):
        given = masked(length)
        assert largest_difference(run_onnx(session, *given), model(*given)) < ONNX_TOLERANCE


def test_onnx():
    check_onnx("t5", True)


@pytest.mark.slow
@pytest.mark.parametrize("name, causal", [form for form in FORMS if form != ("t5", True)])
def test_onnx_of_every_encoding(name, causal):
    check_onnx(name, causal)


class Step(torch.nn.Module):
    """A decoding step: new states and what is cached, to their output and what is cached then."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x, k, v, marks):
        slot = posenc.KVCache().layer(0)
        slot.extend(k, v)
        slot.marks = dict(marks)
        out = self.attn(x, cache=slot)
        return out, slot.k, slot.v, slot.marks


CACHED = [name for name in NAMES if name not in ("sinusoidal", "sinusoidal_2d", "learned", "cape", "tupe")]


def step_inputs(attn, name, past, new):
    width = attn.k_proj.out_features // attn.kv_heads
    k, v = torch.randn(2, 2, attn.kv_heads, past, width).unbind()
    marks = {"kept": torch.randn(2, past, attn.heads, dtype=torch.float64).cumsum(1)} if name == "fox" else {}
    return torch.randn(2, new, 16), k, v, marks


def check_steps(name, grad):
    attn = layer(name).eval()
    model = Step(attn)
    _, past = sizes(4096)
    new = torch.export.Dim("new", max=64)
    open_sizes = {"x": {1: new}, "k": {2: past}, "v": {2: past}, "marks": {"kept": {1: past}} if name == "fox" else {}}
    with torch.set_grad_enabled(grad):
        one = torch.export.export(
            model, step_inputs(attn, name, 6, 1), dynamic_shapes={**open_sizes, "x": {}}
        )  # a step of one token is a form of its own
        several = torch.export.export(model, step_inputs(attn, name, 6, 3), dynamic_shapes=open_sizes)
        for program, count, length in ((one, 1, 9), (one, 1, 4), (several, 4, 9), (several, 2, 11)):
            assert not any("posenc" in operator for operator in operators(program))
            given = step_inputs(attn, name, length, count)
            found, wanted = program.module()(*given), model(*given)
            assert largest_difference(found[:3], wanted[:3]) < 1e-6
            assert found[1].shape[2] == length + count


def test_a_cache_of_any_length():
    check_steps("t5", grad=False)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_a_cache_of_any_length_with_every_encoding(name, grad):
    check_steps(name, grad)


def test_explicit_positions():
    """Where each token is becomes an input of the program; a table of exact distances is as long as they require."""
    attn = layer("transformer_xl").eval()
    _, tokens = sizes(4096)

    def given(length):
        positions = torch.stack((torch.arange(length), torch.arange(length) * 2 + 3))
        return (torch.randn(2, length, 16),), {"positions": positions}

    args, kwargs = given(10)
    program = torch.export.export(attn, args, kwargs, dynamic_shapes={"x": {1: tokens}, "positions": {1: tokens}})
    for length in (7, 19):
        args, kwargs = given(length)
        assert (program.module()(*args, **kwargs) - attn(*args, **kwargs)).abs().max() < 1e-6


def test_plans_without_terms_keep_the_attention_of_pytorch():
    x = torch.randn(2, 10, 16)
    _, tokens = sizes(4096)
    for causal in (False, True):
        attn = posenc.Attention(16, 4, encoding="rope", causal=causal)
        program = torch.export.export(attn, (x,), dynamic_shapes={"x": {1: tokens}})
        assert "aten.scaled_dot_product_attention.default" in operators(program)


@pytest.mark.slow
def test_strict_export():
    attn = layer("t5")
    _, tokens = sizes(4096)
    x = torch.randn(2, 10, 16)
    program = torch.export.export(attn, (x,), dynamic_shapes={"x": {1: tokens}}, strict=True)
    longer = torch.randn(2, 19, 16)
    assert (program.module()(longer) - attn(longer)).abs().max() < 1e-6


def test_a_named_engine_is_taken_at_its_word():
    attn = layer("t5", engine="cpu").eval()
    x = torch.randn(2, 10, 16)
    program = torch.export.export(attn, (x,))
    assert any("posenc" in one for one in operators(program))


def test_nothing_outlives_an_export():
    """What is kept of traced tensors would break the next call."""
    for name in ("rope", "t5"):
        attn = layer(name).eval()
        x = torch.randn(2, 13, 16)  # a length that no other test has
        torch.export.export(attn, (x,))
        reference = posenc.Attention(16, 4, kv_heads=2, encoding=attn.encoding, causal=True, engine="reference")
        reference.load_state_dict(attn.state_dict())
        assert (attn(x) - reference(x)).abs().max() < 1e-6
