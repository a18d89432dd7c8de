"""Distributed trials: a local Ray cluster, and one trial on two processes under torchrun with FSDP2."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from posenc.core import files
from posenc.lab import ray_cluster, results, train
from posenc.lab.presets import load
from posenc.lab.run import compare
from posenc.lab.store import Store

PRESET = """
title = "spread"
encodings = ["t5", "clipped", "learned"]
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
from posenc.lab import cli, process_group, train
from posenc.lab.presets import load
from posenc.lab.store import Store
preset, folder = sys.argv[1:]
group = process_group.from_torchrun("cpu")
trial = load(preset).trials()[0]
class Cut(Exception): pass
def stop(step, loss):
    if step == 11: raise Cut
try:
    train.train(trial.training, Store(folder + "/cut"), group=group, progress=stop, checkpoint_seconds=0)
except Cut:
    pass
record = train.train(trial.training, Store(folder + "/resumed"), group=group)
if group.is_main:
    Store(folder + "/resumed").put("it", "note.json", record)
sys.exit(cli.compare(["--preset", preset, "--out", folder + "/two"]))
"""


@pytest.mark.slow
def test_two_processes_train_one_trial_with_fsdp2(preset, tmp_path):
    """One launch: whole trials, a sharded checkpoint that one process resumes from, and the reverse."""
    one = compare(load(preset), tmp_path / "one", jobs=1)
    trial = load(preset).trials()[0]

    def stop(step, loss):
        if step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(trial.training, Store(tmp_path / "resumed"), progress=stop, checkpoint_seconds=0)
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run([*command, str(preset), str(tmp_path)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\nAnswer\n") == 1  # the main process prints
    two = results.read(tmp_path / "two")
    assert two.finished == one.finished == 3
    for a, b in zip(one.trainings, two.trainings):
        assert a["settings"] == b["settings"] and _near(a["curve"], b["curve"])
    for a, b in zip(one.rows, two.rows):
        assert ("error" in a) == ("error" in b)
        assert b.get("loss", 0) == pytest.approx(a.get("loss", 0), rel=5e-3)
    whole = one.trainings[0]["curve"]
    resumed = Store(tmp_path / "resumed").get("it", "note.json")["curve"]
    assert _near(whole, resumed), list(zip(whole, resumed))
    steps = []
    alone = train.train(trial.training, Store(tmp_path / "cut"), progress=lambda step, _: steps.append(step))
    assert steps[0] == 11 and _near(whole, alone["curve"])


def _near(a, b):
    return len(a) == len(b) and all(x == pytest.approx(y, rel=1e-3) for (_, x), (_, y) in zip(a, b))


# ---- Ray ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def temporary():
    """The folder of temporary files: a short name, because Ray's sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="pe"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(preset, out, temporary, *more):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(temporary),
    }
    command = [sys.executable, "-m", "posenc", "compare", "--preset", str(preset), "--out", str(out), "--on", "ray"]
    with open(out.with_suffix(".log"), "wb") as log:
        return subprocess.Popen([*command, "--jobs", "2", *more], stdout=log, stderr=subprocess.STDOUT, env=env)


def family(psutil, process):
    """The running processes that a process has started, itself included."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def listening(psutil, processes):
    """The addresses on which they listen, with the process's name."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            listens = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found |= {(process.name(), c.laddr.ip) for c in listens}
    return found


@pytest.mark.slow
def test_a_local_ray_cluster(preset, tmp_path, temporary):
    """Killed workers and a killed command leave no folders behind, all sockets are on the loopback address, and the
    results equal those of this process. Run in subprocesses: Ray leaves threads and warnings behind."""
    pytest.importorskip("ray")
    psutil = pytest.importorskip("psutil")
    process = start(preset, tmp_path / "ray", temporary, "--steps", "100000")
    running, workers = [], []
    until = time.time() + 200
    while process.poll() is None and time.time() < until and not workers:
        time.sleep(0.3)
        running = family(psutil, process)
        names = {p.pid: _command(psutil, p) for p in running}
        workers = [p for p in running if "_remote" in names[p.pid]]
    assert workers, (tmp_path / "ray.log").read_text()[-3000:]
    workers[0].send_signal(signal.SIGKILL)
    time.sleep(1)
    (folder,) = temporary.glob("posenc*")
    assert folder.name.startswith("posenc-ray-")  # the cluster's folder, not a worker's
    process.kill()
    process.wait()
    # the cluster ends with the command; Ray's agents take a minute to notice
    assert not psutil.wait_procs([p for p in running if "Agent" not in names[p.pid]], timeout=60)[1]
    assert (folder / ".lock").exists()

    process = start(preset, tmp_path / "ray", temporary)
    sockets = set()
    until = time.time() + 400
    while process.poll() is None and time.time() < until:
        sockets |= listening(psutil, family(psutil, process))
        time.sleep(0.05)
    printed = (tmp_path / "ray.log").read_text()
    assert process.wait() == 0, printed[-3000:]
    # a worker of the killed cluster that started too late may have made its empty directories again
    assert not [p for p in temporary.glob("posenc*") if p != folder or [f for f in p.rglob("*") if f.is_file()]]
    assert {"gcs_server", "raylet"} <= {name for name, _ in sockets} and len({name for name, _ in sockets}) >= 4
    assert {ip for _, ip in sockets} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, sockets
    one, many = compare(load(preset), tmp_path / "one", jobs=1), results.read(tmp_path / "ray")
    assert many.finished == 3 and many.rows == one.rows
    for trial in load(preset).trials():
        ours, theirs = (
            Store(tmp_path / name).read(trial.training.key, kind) for name in ("one", "ray") for kind in ("weights",)
        )
        assert ours == theirs


def _command(psutil, process):
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


@pytest.mark.slow
def test_ray_that_would_listen_elsewhere_is_refused(tmp_path):
    """Ray reads its settings when it is imported."""
    pytest.importorskip("ray")
    code = (
        "import ray\nfrom posenc.lab import ray_cluster\nfrom posenc.lab.errors import LabError\n"
        "try:\n    with ray_cluster._cluster('ray', 1): print('listens')\n"
        "except LabError as error: print(error)\nprint(ray.is_initialized())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    printed = done.stdout.splitlines()
    assert "not on this machine alone" in printed[-2] and printed[-1] == "False", done.stdout + done.stderr[-2000:]


def test_folders_of_killed_commands_are_removed_and_those_in_use_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "MAX_FOLDER_LENGTH", 1000)
    for name in ("posenc-ray-killed", "posenc-ray-used", "posenc-ray-new", "posenc-ray-again", "other"):
        (tmp_path / name / "session").mkdir(parents=True)
    os.utime(tmp_path / "posenc-ray-again", (0, 0))  # made again after its removal: old, and without a lock
    for name in ("posenc-ray-killed", "posenc-ray-used", "other"):
        (tmp_path / name / ".lock").touch()
    held = files.lock(tmp_path / "posenc-ray-used" / ".lock")
    try:
        with ray_cluster._folder() as folder:
            (folder / "session").mkdir()
            there = {path.name for path in tmp_path.iterdir()}
            with pytest.raises(BlockingIOError):
                files.lock(folder / ".lock")
        assert there == {"posenc-ray-used", "posenc-ray-new", "other", folder.name}
        assert {path.name for path in tmp_path.iterdir()} == {"posenc-ray-used", "posenc-ray-new", "other"}
    finally:
        os.close(held)
