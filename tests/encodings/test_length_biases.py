"""KERPLE, Sandwich and FIRE by their formulas, which have no implementation in the libraries that the tests use."""

import math

import pytest
import torch

import posenc
from posenc import Positions
from tests.encodings.test_bias import dense


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_is_its_formula(form):
    encoding = posenc.Kerple(heads=3, form=form).double()
    with torch.no_grad():
        encoding.a.copy_(torch.tensor([0.3, -1.0, 0.9], dtype=torch.float64))  # read as 0.01
        encoding.p.copy_(torch.tensor([1.5, 0.7, 2.4], dtype=torch.float64))  # read as 2 in the power form
    bias = dense(encoding, Positions((4, 5), 9), 3)
    for h, (a, p) in enumerate([(0.3, 1.5), (0.01, 0.7), (0.9, 2.4 if form == "log" else 2.0)]):
        for i in range(5):
            for j in range(9):
                d = abs(4 + i - j)
                expected = -p * math.log(1 + a * d) if form == "log" else -a * d**p
                assert bias[h, i, j].item() == pytest.approx(expected, abs=1e-10)


def test_kerple_of_power_one_is_alibi():
    encoding, alibi = posenc.Kerple(heads=4, form="power", least=1e-4), posenc.ALiBi(heads=4)
    with torch.no_grad():
        encoding.a.copy_(torch.tensor(alibi.start))
        encoding.p.fill_(1.0)
    torch.testing.assert_close(dense(encoding, Positions(9), 4), dense(alibi, Positions(9), 4))


def test_sandwich_has_the_published_numbers():
    """Of size 128, before the division by 8h/H: distances 1, 8 and 512."""
    encoding = posenc.Sandwich(heads=8).double()
    bias = dense(encoding, Positions((512, 1), 513), 8)[:, 0]
    for distance, expected in ((0, 0.0), (1, -1.4466), (8, -17.134), (512, -47.961)):
        for h in range(8):
            assert bias[h, 512 - distance].item() == pytest.approx(expected / (h + 1), abs=1e-3)
    sums = sum(math.cos(37 * 10000 ** (-2 * c / 128)) for c in range(1, 65)) - 64
    assert bias[0, 512 - 37].item() == pytest.approx(sums, abs=1e-10)


def test_sandwich_is_the_same_in_compiled_code_and_for_positions_that_jump():
    encoding = posenc.Sandwich(heads=2, size=16).double()
    at = torch.tensor([[0, 3, 10**6]])
    zero = torch.zeros(1, 2, 3, 4, dtype=torch.float64)
    bias = posenc.scores(zero, zero, encoding.plan(Positions(at)))[0, 0, 2]
    for j, d in enumerate((10**6, 10**6 - 3, 0)):
        sums = sum(math.cos(d * 10000 ** (-2 * c / 16)) - 1 for c in range(1, 9))
        assert bias[j].item() == pytest.approx(sums / 4, abs=1e-9)


def naive_fire(encoding, i, j):
    """MLP(ln(1 + |c (i - j)|) / (ln(1 + |c max(i, T)|) + eps)) for one pair."""
    c, edge = encoding.c, (encoding.multiplier * encoding.threshold).abs()
    phi = lambda x: torch.log((c * x).abs() + 1)  # noqa: E731
    part = phi(torch.tensor(float(i - j)).double()) / (phi(torch.maximum(torch.tensor(float(i)).double(), edge)) + 1e-6)
    return encoding.last(torch.relu(encoding.first(part.reshape(1, 1))))[0]


@pytest.mark.parametrize("multiplier", [0.8, 2.0, -1.4])
def test_fire_is_its_formula(multiplier):
    """Below the threshold a table by distance, past it a function of both positions: the same numbers."""
    encoding = posenc.Fire(heads=3, threshold=6.0).double()
    with torch.no_grad():
        encoding.multiplier.fill_(multiplier)
    for positions in (Positions(5), Positions((3, 7), 10), Positions(torch.arange(4, 12), torch.arange(12))):
        plan = encoding.plan(positions)
        last = int(positions.q_positions().max())
        assert (plan.pair is None) == (positions.runs is not None and last <= 6.0 * abs(multiplier))
        bias = dense(encoding, positions, 3)
        for r, i in enumerate(positions.q_positions().tolist()):
            for column, j in enumerate(positions.k_positions().tolist()):
                torch.testing.assert_close(bias[:, r, column], naive_fire(encoding, i, j), rtol=0, atol=1e-10)


def test_fire_notices_that_its_threshold_was_trained():
    encoding = posenc.Fire(heads=2, threshold=8.0)
    assert encoding.plan(Positions(8)).pair is None
    with torch.no_grad():
        encoding.multiplier.mul_(0.5)
    assert encoding.plan(Positions(8)).pair is not None
    with torch.inference_mode():
        frozen = posenc.Fire(heads=2, threshold=8.0)
        assert frozen.plan(Positions(8)).pair is None


def test_fire_notices_a_threshold_that_was_changed_without_a_new_version():
    """An exponential moving average writes to `.data`, which leaves the parameter's version as it is."""
    encoding = posenc.Fire(heads=2, threshold=8.0)
    assert encoding.plan(posenc.Positions(8)).pair is None
    encoding.multiplier.data.fill_(0.5)
    assert encoding.plan(posenc.Positions(8)).pair is not None


@pytest.mark.parametrize("name", ["kerple", "sandwich", "fire"])
def test_they_run_fused_on_a_cpu_at_training_lengths(name):
    q, k, v = torch.randn(3, 1, 4, 64, 8).unbind()
    assert posenc.explain(q, k, v, posenc.create(name, heads=4).plan(Positions(64)), causal=True).engine == "cpu"


@pytest.mark.parametrize("name", ["kerple", "fire"])
def test_gradients_in_half_precision_are_summed_in_float32(name):
    torch.manual_seed(1)
    encoding = posenc.create(name, heads=2)
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()

    def gradients(dtype):
        out = posenc.attend(*(x.to(dtype) for x in (q, k, v)), encoding.plan(Positions(40)), causal=True)
        return torch.autograd.grad(out.float().square().sum(), list(encoding.parameters()))

    for ours, exact in zip(gradients(torch.bfloat16), gradients(torch.float32)):
        assert (ours - exact).norm() <= 0.05 * exact.norm() + 1e-3


@pytest.mark.parametrize("cls, options", [
    (posenc.Kerple, dict(form="exp")), (posenc.Kerple, dict(least=0.0)), (posenc.Sandwich, dict(size=0)),
    (posenc.Fire, dict(threshold=0.0)), (posenc.Fire, dict(hidden=0)),
])  # fmt: skip
def test_bad_options(cls, options):
    with pytest.raises(posenc.OptionError):
        cls(heads=2, **options)
