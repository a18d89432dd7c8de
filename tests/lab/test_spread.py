"""Cells elsewhere: a local Ray cluster, and one cell on two processes under torchrun with FSDP2."""

import os
import subprocess
import sys

import pytest

from posenc.lab import results, train
from posenc.lab.presets import load
from posenc.lab.run import compare
from posenc.lab.store import Store

PRESET = """
title = "spread"
schemes = ["t5", "clipped", "learned"]
seeds = 1
batch = 6
width = 16
heads = 2
layers = 2
steps = 20
count = 16
[[tasks]]
task = "previous"
train = 6
test = [6, 12]
"""


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "spread.toml"
    path.write_text(PRESET)
    return path


TOGETHER = """
import sys
from posenc.lab import cli, team, train
from posenc.lab.presets import load
from posenc.lab.store import Store
preset, folder = sys.argv[1:]
members = team.from_torchrun("cpu")
cell = load(preset).cells()[0]
class Cut(Exception): pass
def stop(step, loss):
    if step == 11: raise Cut
try:
    train.train(cell.training, Store(folder + "/cut"), team=members, progress=stop, checkpoint_seconds=0)
except Cut:
    pass
record = train.train(cell.training, Store(folder + "/resumed"), team=members)
if members.first:
    Store(folder + "/resumed").put("it", "train.json", record)
sys.exit(cli.compare(["--preset", preset, "--out", folder + "/two"]))
"""


def test_two_processes_train_one_cell_with_fsdp2(preset, tmp_path):
    """One launch: cells as a whole, a sharded checkpoint that one process goes on from, and the other way round."""
    one = compare(load(preset), tmp_path / "one", jobs=1)
    cell = load(preset).cells()[0]

    def stop(step, loss):
        if step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(cell.training, Store(tmp_path / "resumed"), progress=stop, checkpoint_seconds=0)
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run([*command, str(preset), str(tmp_path)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Verdict") == 1  # one of them speaks
    two = results.read(tmp_path / "two")
    assert two.finished == one.finished == 3
    for a, b in zip(one.trainings, two.trainings):
        assert a["settings"] == b["settings"] and _near(a["curve"], b["curve"])
    for a, b in zip(one.rows, two.rows):
        assert ("error" in a) == ("error" in b)
        assert b.get("loss", 0) == pytest.approx(a.get("loss", 0), rel=5e-3)
    whole = one.trainings[0]["curve"]
    resumed = Store(tmp_path / "resumed").get("it", "train.json")["curve"]
    assert _near(whole, resumed), list(zip(whole, resumed))
    seen = []
    alone = train.train(cell.training, Store(tmp_path / "cut"), progress=lambda step, _: seen.append(step))
    assert seen[0] == 11 and _near(whole, alone["curve"])


def _near(a, b):
    return len(a) == len(b) and all(x == pytest.approx(y, rel=1e-3) for (_, x), (_, y) in zip(a, b))


@pytest.mark.slow
def test_a_local_ray_cluster_gives_the_same_numbers(preset, tmp_path, text):
    """In a process of its own: Ray leaves threads and warnings behind."""
    pytest.importorskip("ray")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "posenc", "compare", "--preset", str(preset), "--out", str(tmp_path / "ray")]
    done = subprocess.run(
        [*command, "--on", "ray", "--jobs", "2"], capture_output=True, text=True, env=env, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, many = compare(load(preset), tmp_path / "one", jobs=1), results.read(tmp_path / "ray")
    assert many.finished == 3 and many.rows == one.rows
    assert all((tmp_path / "ray" / "cells" / f"{c.training.key}.weights").exists() for c in load(preset).cells())
