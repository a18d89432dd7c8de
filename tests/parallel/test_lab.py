"""posenc compare --shard sequence: a trial whose processes share each sequence is the trial of one process."""

import pytest

from posenc.lab import process_group, train
from posenc.lab.errors import LabError
from posenc.lab.presets import from_dict
from posenc.lab.store import Store

TASKS = {"previous": ["learned"], "neighbour": ["t5"]}


def trials(steps):
    settings = dict(train=9, test=[9], steps=steps, seeds=1, batch=4, width=16, heads=4, layers=2, count=4)
    tasks = [{"task": task, "encodings": encodings, **settings} for task, encodings in TASKS.items()]
    return from_dict({"tasks": tasks}, "together").trials()


def train_together(group, folder, steps):
    from posenc.parallel import ContextParallel

    context = ContextParallel(group, balance="zigzag", timeout=60.0)
    ours = process_group.ProcessGroup(context.rank, context.size, context)
    return [train.train(trial.training, Store(folder), group=ours)["curve"] for trial in trials(steps)]


@pytest.mark.slow
def test_a_trial_whose_processes_share_each_sequence(ranks, tmp_path):
    steps = 4
    together = ranks.run(train_together, 4, str(tmp_path / "four"), steps)
    alone = [train.train(trial.training, Store(tmp_path / "one"))["curve"] for trial in trials(steps)]
    assert together[0] == together[3]
    for ours, theirs in zip(together[0], alone, strict=True):
        assert [step for step, _ in ours] == [step for step, _ in theirs]
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-5)


def test_one_process_cannot_share_a_sequence(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LabError, match="torchrun --nproc-per-node"):
        process_group.from_torchrun("cpu", "sequence")
