"""Dropout by a hash: each probability's draw depends on the seed, its head and its slots, and on nothing else."""

import torch

from posenc.core.dropout import Dropout, draw_seed


def factors(draw, rows=range(64), columns=range(96), batch=2, heads=3):
    return draw.factors(batch, heads, rows, columns, torch.float64)


def test_a_part_of_the_sequence_drops_what_the_whole_drops():
    seed = torch.tensor([123456789012345678])
    whole = factors(Dropout(0.3, seed))
    assert torch.equal(factors(Dropout(0.3, seed), range(10, 20), range(5, 50)), whole[:, :, 10:20, 5:50])
    part = Dropout(0.3, seed, q=(10, 1), k=(5, 1), heads=(1, 3))
    assert torch.equal(factors(part, range(10), range(45), heads=2), whole[:, 1:, 10:20, 5:50])
    later = Dropout(0.3, seed, k=(2, 3))
    assert torch.equal(factors(later.from_key(4), columns=range(9)), factors(later, columns=range(13))[..., 4:])
    stripes = Dropout(0.3, seed, q=(1, 3), k=(2, 4))
    assert torch.equal(factors(stripes, range(21), range(23)), whole[:, :, 1::3, 2::4][:, :, :21, :23])


def test_rates_and_independence():
    torch.manual_seed(1)
    for rate in (0.05, 0.5, 0.9):
        drawn = factors(Dropout(rate, draw_seed(torch.device("cpu"))), range(256), range(256))
        assert set(drawn.unique().tolist()) == {0.0, 1.0 / (1.0 - rate)}
        found = (drawn > 0.0).double()
        kept = found.mean(dim=(-1, -2))
        assert ((kept - (1.0 - rate)).abs() < 6 * (rate * (1.0 - rate) / 2**16) ** 0.5).all()
        centred = found.flatten(2) - found.flatten(2).mean(-1, keepdim=True)
        heads = torch.corrcoef(centred.flatten(0, 1)) - torch.eye(6, dtype=torch.float64)
        assert heads.abs().max() < 6 / 256
        for dim in (2, 3):  # neighbours
            a, b = found.narrow(dim, 0, 255), found.narrow(dim, 1, 255)
            assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 6 / found.numel() ** 0.5
    a, b = (factors(Dropout(0.5, torch.tensor([seed]))) for seed in (1, 2))
    assert not torch.equal(a, b)
