"""Sinusoidal and learned positions against the models that use them."""

import pytest
import torch

import posenc
from posenc import Positions
from posenc.encodings.absolute import sinusoid


def added(encoding, length=None, positions=None, d_model=None):
    x = torch.zeros(1, length or positions.q_length, d_model or encoding.d_model, dtype=torch.float64)
    return encoding.embed(x, positions or Positions(length))[0]


def test_interleaved_is_distilberts():
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

    out = torch.empty(50, 12)
    create_sinusoidal_embeddings(50, 12, out)
    torch.testing.assert_close(added(posenc.Sinusoidal(d_model=12), 50).float(), out, rtol=0, atol=1e-6)


def test_concatenated_is_marians():
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    table = MarianSinusoidalPositionalEmbedding(50, 12)
    out = table.create_weight()
    encoding = posenc.Sinusoidal(d_model=12, layout="concatenated")
    torch.testing.assert_close(added(encoding, 50).float(), out, rtol=0, atol=1e-6)


def test_tensor2tensor_is_whispers():
    from transformers.models.whisper.modeling_whisper import sinusoids

    encoding = posenc.Sinusoidal(d_model=12, layout="tensor2tensor")
    torch.testing.assert_close(added(encoding, 50).float(), sinusoids(50, 12), rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", ["interleaved", "concatenated", "tensor2tensor"])
def test_odd_widths(layout):
    out = sinusoid(torch.arange(9), 7, layout=layout)
    assert out.shape == (9, 7)
    wide = sinusoid(torch.arange(9), 8, layout=layout)
    if layout == "tensor2tensor":
        assert out[:, 6].abs().max() == 0
        torch.testing.assert_close(out[:, :3], sinusoid(torch.arange(9), 6, layout=layout)[:, :3])
    else:
        sines = out[:, 0::2] if layout == "interleaved" else out[:, :4]
        assert sines.shape[1] == 4
        assert torch.equal(sines[:, 0], wide[:, 0])


def test_the_last_wavelength_of_tensor2tensor_is_the_base():
    out = sinusoid(torch.tensor([1000]), 8, base=1000.0, layout="tensor2tensor")
    assert out[0, 3].item() == pytest.approx(torch.tensor(1.0, dtype=torch.float64).sin().item())


def test_far_positions_are_exact_and_need_no_table():
    encoding = posenc.Sinusoidal(d_model=64)
    far = added(encoding, positions=Positions((5_000_000, 3)))
    assert torch.isfinite(far).all()
    exact = torch.tensor([float(torch.tensor(5_000_000 + i, dtype=torch.float64).sin()) for i in range(3)])
    torch.testing.assert_close(far[:, 0].float(), exact, rtol=0, atol=1e-7)
    bf16 = posenc.Sinusoidal(d_model=64).to(torch.bfloat16)
    assert torch.equal(added(bf16, positions=Positions((5_000_000, 3))), far)


def test_shifting_a_position_is_a_fixed_rotation():
    p = sinusoid(torch.arange(40), 16)
    gram = p @ p.t()
    for shift in (1, 7):
        torch.testing.assert_close(gram[0, shift], gram[20, 20 + shift])
        torch.testing.assert_close(gram[20, 20 - shift], gram[20, 20 + shift])


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_learned_is_the_models_own(name):
    if name == "bert":
        from transformers import BertConfig
        from transformers.models.bert.modeling_bert import BertEmbeddings

        oracle = BertEmbeddings(BertConfig(hidden_size=8, max_position_embeddings=11, vocab_size=5)).eval()
        table, offset = oracle.position_embeddings.weight, 0
        words = torch.randint(0, 5, (2, 11))
        expected = oracle(words)
        x = oracle.word_embeddings(words) + oracle.token_type_embeddings(torch.zeros_like(words))
        finish = oracle.LayerNorm
    else:
        from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

        oracle = OPTLearnedPositionalEmbedding(11, 8)
        table, offset = oracle.weight, 2
        x = torch.randn(2, 11, 8)
        expected = x + oracle(torch.ones(2, 11, dtype=torch.int64))
        finish = torch.nn.Identity()
    encoding = posenc.Learned(max_length=11, d_model=8, offset=offset)
    encoding.load_state_dict({"table": table})
    torch.testing.assert_close(finish(encoding.embed(x, Positions(11))), expected, rtol=0, atol=1e-6)


def test_learned_says_the_length_the_limit_and_what_to_do():
    encoding = posenc.Learned(max_length=8, d_model=4)
    for positions in (Positions(9), Positions((8, 1)), Positions(torch.tensor([3, 8]))):
        with pytest.raises(ValueError, match=r"max_length=8.*length 9.*resize\(9\)"):
            added(encoding, positions=positions, d_model=4)
    assert added(encoding, 8, d_model=4).shape == (8, 4)


def test_resize_interpolates():
    encoding = posenc.Learned(max_length=4, d_model=3, offset=1)
    with torch.no_grad():
        encoding.table[1:] = torch.arange(4.0)[:, None]
        encoding.table[0] = 9.0
    before = encoding.table.clone()
    assert encoding.resize(8) is encoding
    assert encoding.table[1:, 0].tolist() == [0.0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.0]
    assert torch.equal(encoding.table[0], before[0])
    assert added(encoding, 8, d_model=3).shape == (8, 3)
    with pytest.raises(ValueError, match="at least 1"):
        encoding.resize(0)


@pytest.mark.parametrize("encoding", [posenc.Sinusoidal(d_model=4), posenc.Learned(max_length=8, d_model=4)])
def test_negative_positions_get_a_sentence(encoding):
    for positions in (Positions((-1, 3)), Positions(torch.tensor([0, -1]))):
        with pytest.raises(ValueError, match="must be 0 or more, got -1"):
            added(encoding, positions=positions, d_model=4)


def test_bad_options():
    with pytest.raises(posenc.OptionError, match="interleaved"):
        posenc.Sinusoidal(d_model=4, layout="stacked")
    with pytest.raises(posenc.OptionError, match="at least 2"):
        posenc.Sinusoidal(d_model=1)
    with pytest.raises(posenc.OptionError, match="max_length=0"):
        posenc.Learned(max_length=0, d_model=4)
