"""Runs: they resume after a kill at any moment, compute nothing twice, agree between workers and this process, and record
failures as results."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from posenc.lab import corpus, evaluate, results, run_trial, train, worker_processes
from posenc.lab.errors import LabError, TrialFailure
from posenc.lab.presets import from_dict
from posenc.lab.run import compare
from posenc.lab.store import MemoryStore, Store


def records(folder, kind):
    return {p.name: json.loads(p.read_text()) for p in sorted(Path(folder, "trials").glob(f"*.{kind}.json"))}


@pytest.fixture
def calls(monkeypatch):
    """The trainings and tests that a run computes."""
    made = []
    trained, tested = train.train, evaluate.evaluate
    monkeypatch.setattr(run_trial, "train", lambda *a, **k: made.append("train") or trained(*a, **k))
    monkeypatch.setattr(run_trial, "evaluate", lambda *a, **k: made.append("test") or tested(*a, **k))
    return made


def test_a_second_run_computes_nothing_and_more_encodings_only_what_is_new(tiny, run_copy, text, calls):
    first = results.read(run_copy)
    assert first.finished == first.wanted == 24
    again = compare(tiny(seeds=2, rates=[2.0]), run_copy, text=text, jobs=1)
    assert not calls and again.rows == first.rows
    compare(tiny().change(encodings=("rope", "rope+linear:2")), run_copy, text=text, jobs=1)
    assert calls == ["test", "test"]  # one a task, on the same weights
    calls.clear()
    compare(tiny(tasks=("previous",)).change(encodings=("rope",), lr=5e-3), run_copy, jobs=1)
    assert calls == ["train", "test"]


def test_a_published_run_goes_on_without_its_weights(tiny, run_copy, text, calls):
    """results.json alone, as in docs/results: finished trials are not computed again, missing ones are."""
    first = results.read(run_copy)
    report_of_one = json.loads((run_copy / "results.json").read_text())
    seeds = [t for t in report_of_one["trainings"] if t["settings"]["seed"] == 0]
    report_of_one["trainings"] = seeds
    report_of_one["rows"] = [row for row in report_of_one["rows"] if row["seed"] == 0]
    for path in run_copy.rglob("*"):
        if path.is_file() and path.name != "results.json":
            path.unlink()
    (run_copy / "results.json").write_text(json.dumps(report_of_one))
    again = compare(tiny(seeds=2, rates=[2.0]), run_copy, text=text, jobs=1)
    assert again.finished == again.wanted == 24
    assert sorted(map(str, again.rows)) == sorted(map(str, first.rows))
    assert calls.count("train") == len(first.trainings) - len(seeds) > 0


def test_learned_positions_report_their_end(run_folder):
    rows = [r for r in results.read(run_folder).rows if (r["task"], r["encoding"]) == ("text", "learned")]
    here, far = rows[:2]
    assert here["loss"] > 0 and "error" not in here
    assert "max_length=16" in far["error"] and "loss" not in far


def test_workers_and_this_process_write_the_same_files_and_continue_after_a_failed_trial(
    tiny, tmp_path, text, run_folder
):
    """learned:max_length=4 breaks in the middle of its training, in a worker."""
    experiment = tiny(tasks=("text",), encodings=["none", "learned:max_length=4", "rope", "rope+ntk:8"])
    with pytest.raises(TrialFailure, match="learned:max_length=4 failed.*\n[^$]*max_length=4"):
        compare(experiment, tmp_path, text=text, jobs=2)
    found = results.read(tmp_path)
    assert found.finished == 2 and found.wanted == 3
    assert "provisional: 2 of 3 trials" in (tmp_path / "report.html").read_text().lower()
    assert len(found.rows) == 6 and all(row in results.read(run_folder).rows for row in found.rows)
    weights = list(tmp_path.glob("trials/*.weights"))
    assert len(weights) == 2  # the same bits: a trial has its own number of threads
    assert all(path.read_bytes() == (run_folder / "trials" / path.name).read_bytes() for path in weights)


def test_the_process_s_threads_do_not_change_a_trial():
    """A trial of this size gives other bits with two threads: its own number of threads is used, not the process's."""
    wide = {"task": "copy", "train": 32, "test": [32], "batch": 32, "width": 64, "steps": 2, "count": 64}
    settings = {"encodings": ["alibi"], "seeds": 1, "heads": 2, "layers": 1, "tasks": [wide]}
    trial = from_dict(settings, "wide").trials()[0]
    files, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            store = MemoryStore({})
            run_trial.run_trial(trial, store)
            assert torch.get_num_threads() == threads
            files.append(store.read(trial.training.key, "weights"))
    finally:
        torch.set_num_threads(before)
    assert files[0] == files[1]
    two = from_dict({**settings, "threads": 2}, "wide").trials()[0]
    assert two.training.threads == 2 and two.training.key != trial.training.key


def test_swapped_weights_are_reported_and_computed_again(tiny, run_copy, text, capsys, calls):
    """none, alibi and rope have weights of the same shapes: only the file's metadata identifies the trial."""
    experiment = tiny(tasks=("text",))
    store = Store(run_copy)
    trials = {c.name(): c for c in experiment.trials(corpus.read(text).digest)}
    paths = [store.path(trials[name].training.key, "weights") for name in ("none", "alibi")]
    whole = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(whole)):
        path.write_bytes(content)
    first = results.read(run_copy)
    for name in ("none", "alibi"):
        store.drop(trials[name].test_key(trials[name].tests[0]), "test.json")
    compare(experiment, run_copy, text=text, jobs=1)
    printed = capsys.readouterr().err.splitlines()
    assert [line.split("; ")[1] for line in printed] == [
        f"text, {n}, seed 0 is computed again" for n in ("none", "alibi")
    ]
    assert all("it holds weights of the trial" in line for line in printed)
    assert calls == ["train", "test"] * 2
    assert [path.read_bytes() for path in paths] == whole
    assert compare(tiny(seeds=2, rates=[2.0]), run_copy, text=text, jobs=1).rows == first.rows


def test_swapped_and_damaged_checkpoints_are_reported_and_not_used(tiny, tmp_path, text, run_folder, capsys):
    class Cut(Exception):
        pass

    def stop(step, loss):
        if step == 7:
            raise Cut

    source = corpus.read(text)
    experiment = tiny(tasks=("text",), encodings=["none", "alibi", "rope"])
    store, trials = Store(tmp_path), experiment.trials(source.digest)
    for trial in trials:
        with pytest.raises(Cut):
            train.train(trial.training, store, source, progress=stop, checkpoint_seconds=0)
    a, b, c = (store.path(trial.training.key, "checkpoint") for trial in trials)
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    c.write_bytes(content[:-1])
    found = compare(experiment, tmp_path, text=text, jobs=1)
    assert capsys.readouterr().err.count("is computed again") == 3
    assert found.finished == 3 and all(row in results.read(run_folder).rows for row in found.rows)


def test_resuming_from_a_checkpoint_equals_an_uninterrupted_training(tiny, tmp_path, text):
    source = corpus.read(text)
    for trial in tiny(steps=20, encodings=["t5"]).trials(source.digest):
        whole = train.train(trial.training, Store(tmp_path / "whole"), source, checkpoint_seconds=0)
        store = Store(tmp_path / "cut")

        class Cut(Exception):
            pass

        def stop(step, loss):
            if step == 13:
                raise Cut

        with pytest.raises(Cut):
            train.train(trial.training, store, source, progress=stop, checkpoint_seconds=0)
        steps = []
        rest = train.train(trial.training, store, source, progress=lambda step, _, steps=steps: steps.append(step))
        assert steps[0] == 13  # resumed from the checkpoint of step 12
        assert rest["curve"] == whole["curve"]
        key = trial.training.key
        assert store.path(key, "weights").read_bytes() == Store(tmp_path / "whole").path(key, "weights").read_bytes()


def start(preset, out, text, *more):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable,
        "-m",
        "posenc",
        "compare",
        "--preset",
        str(preset),
        "--out",
        str(out),
        "--text",
        str(text),
    ]
    return subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


PRESET = """
title = "kill"
encodings = ["none", "alibi", "rope", "rope+ntk:8"]
seeds = 2
batch = 4
width = 16
heads = 2
layers = 1
steps = 60
[[tasks]]
task = "text"
train = 32
test = [32, 64]
count = 256
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [((0.05, "1"),), ((0.05, "2"), (0.3, "1"), (1.0, "2"))])
def test_a_run_resumes_after_a_kill_at_any_moment(tmp_path, text, kills):
    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    out = tmp_path / "run"
    for delay, jobs in kills:
        process = start(preset, out, text, "--jobs", jobs)
        before = time.time()
        while not list(out.glob("trials/*.json")) and time.time() - before < 300 and process.poll() is None:
            time.sleep(0.02)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()  # waits for its workers too
    kept = {**records(out, "train"), **records(out, "test")}  # every file is complete: it parses
    stamps = {name: (out / "trials" / name).stat().st_mtime_ns for name in kept}
    assert kept
    process = start(preset, out, text, "--jobs", "1")
    printed = process.communicate(timeout=600)[0]
    assert process.returncode == 0, printed
    assert len(records(out, "train")) == 6 and len(records(out, "test")) == 8
    for name, stamp in stamps.items():
        assert (out / "trials" / name).stat().st_mtime_ns == stamp, "a finished result was computed again"
    assert results.read(out).finished == 6
    assert "Answer" in printed


@pytest.mark.slow
def test_a_dead_worker_is_replaced_once(tiny, tmp_path):
    trials = tiny(tasks=("previous",)).change(encodings=("alibi",)).trials()
    trials += tiny(tasks=("previous",)).change(steps=1000, encodings=("none",)).trials()
    store = Store(tmp_path)
    steps = []
    with pytest.raises(LabError, match="died twice"):
        for event in worker_processes.run(trials, store, None, jobs=1):
            if event.step is None:
                for idle in multiprocessing.active_children():
                    idle.kill()  # it is idle: nothing is lost
                    idle.join()
            elif event.trial == trials[1]:
                steps.append(event.step)
                for child in multiprocessing.active_children():
                    child.kill()
    first, second = (store.get(trial.training.key, "train.json") for trial in trials)
    assert first is not None and second is None
    assert steps


def test_a_training_that_diverges_is_a_result(tiny, tmp_path, text):
    experiment = tiny(tasks=("text",)).change(encodings=("none",), lr=1e30, steps=60)
    found = compare(experiment, tmp_path, text=text, jobs=1)
    assert found.trainings[0]["status"].startswith("diverged at step")
    assert all(row["error"].startswith("diverged") for row in found.rows)
    assert found.finished == 1


def test_texts_never_mix(tiny, tmp_path, text):
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    experiment = tiny(tasks=("text",)).change(encodings=("none",))
    a = compare(experiment, tmp_path / "run", text=text, jobs=1)
    b = compare(experiment, tmp_path / "run", text=other, jobs=1)
    assert a.rows != b.rows
    assert len(records(tmp_path / "run", "train")) == 2


def test_the_standard_library_is_read_the_same_way_twice():
    a, b = corpus.read(), corpus.read()
    assert a == b and a.digest == b.digest
    assert len(a.train) > 2_000_000 and len(a.held_out) > 200_000
    assert b"import " in a.held_out


def test_invalid_arguments_are_refused(tiny, tmp_path):
    with pytest.raises(LabError, match="--jobs 0"):
        compare(tiny(), tmp_path, jobs=0)
    with pytest.raises(LabError, match="use here, ray"):
        compare(tiny(), tmp_path, on="slurm")
    with pytest.raises(ValueError, match="unknown encoding"):
        compare(tiny().change(encodings=("ropee",)), tmp_path)
    with pytest.raises(LabError, match="cannot read the text"):
        compare(tiny(), tmp_path, text=tmp_path / "none.txt")
    with pytest.raises(LabError, match=r"\[\[tasks\]\]"):
        from_dict({"encodings": ["none"]}, "x")
    with pytest.raises(LabError, match="unknown settings stepz"):
        from_dict({"tasks": [{"task": "copy", "stepz": 3}]}, "x")
    with pytest.raises(LabError, match="train, test, steps, encodings missing"):
        from_dict({"tasks": [{"task": "copy"}]}, "x")
    with pytest.raises(LabError, match="steps='3' must be a whole number from 1 to"):
        from_dict({"tasks": [{"task": "copy", "train": 1, "test": [1], "encodings": ["none"], "steps": "3"}]}, "x")


def test_without_safetensors_nothing_is_started(tmp_path, monkeypatch, capsys):
    from posenc.cli.main import main

    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(["compare", "--preset", "smoke", "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert "the lab needs safetensors" in printed and "pip install 'posenc[lab]'" in printed
    assert not (tmp_path / "run").exists()


def test_a_learning_rate_check_adds_trials(tiny):
    plain = tiny(tasks=("previous",))
    checked = plain.change(rates=(0.5, 2.0))
    more = [trial for trial in checked.trials() if trial not in plain.trials()]
    assert {trial.training.lr for trial in more} == {5e-4, 2e-3}
    assert {trial.training.encoding for trial in more} == {"none", "learned", "alibi", "rope"}
    assert replace(more[0].training, lr=1e-3).key in {trial.training.key for trial in plain.trials()}


def test_a_model_that_does_not_compile_is_trained_without(tiny, tmp_path, monkeypatch):
    trial = tiny(tasks=("previous",)).change(encodings=("alibi",)).trials()[0]

    def broken(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    plain = train.train(trial.training, Store(tmp_path))
    tried = train.train(replace(trial.training, compile=True), Store(tmp_path))
    assert plain["compile"] == "off"
    assert tried["compile"] == "failed, trained without: RuntimeError: no compiler here"
    assert tried["curve"] == plain["curve"]


def test_damaged_files_are_computed_again(tiny, tmp_path, text):
    experiment = tiny(tasks=("text",), encodings=["t5"], steps=4)
    first = compare(experiment, tmp_path, text=text, jobs=1)
    (trained,), (tested,), (weights,) = (
        list(tmp_path.glob(f"trials/*.{kind}")) for kind in ("train.json", "test.json", "weights")
    )
    whole = {path: path.read_bytes() for path in (trained, tested, weights)}
    for damaged in ((trained,), (tested,), (weights, tested), (trained, tested, weights)):
        for path in damaged:
            path.write_bytes(whole[path][: len(whole[path]) // 2])
        again = compare(experiment, tmp_path, text=text, jobs=1)
        assert again.finished == 1 and again.rows == first.rows
        assert weights.read_bytes() == whole[weights] or weights not in damaged
    # a damaged checkpoint is not used
    trial = experiment.trials(corpus.read(text).digest)[0]
    for path in whole:
        path.unlink()
    Store(tmp_path).path(trial.training.key, "checkpoint").write_bytes(whole[weights][:-1])
    assert compare(experiment, tmp_path, text=text, jobs=1).rows == first.rows


def test_the_command_reports_failed_trials_without_its_own_traceback(tmp_path, text, capsys, monkeypatch):
    from posenc.lab import cli

    def broken(*_, **__):
        raise ZeroDivisionError("in the middle")

    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    monkeypatch.setattr(run_trial, "train", broken)
    arguments = [
        "--preset",
        preset,
        "--out",
        tmp_path / "run",
        "--text",
        text,
        "--jobs",
        "1",
        "--encodings",
        "none",
        "alibi",
    ]
    assert cli.compare([*map(str, arguments), "--seeds", "1"]) == 1
    printed = capsys.readouterr().err
    assert printed.count("failed:") == 2  # the second trial runs after the first has failed
    assert (
        "text, none failed" in printed
        and "text, alibi failed" in printed
        and "ZeroDivisionError: in the middle" in printed
        and "report.html" in printed
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of a file")
@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_no_room_for_the_weights(tmp_path, text, jobs):
    """Records fit the limit and weights do not: the command reports it and resumes later."""
    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
    limited += "from posenc.cli.main import main; sys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["compare", "--preset", preset, "--out", tmp_path / "run", "--text", text, "--jobs", jobs]
    printed = subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=600
    )
    assert printed.returncode == 2 and "cannot write" in printed.stderr and "Traceback" not in printed.stderr, (
        printed.stderr
    )
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.train.json"))


def test_two_commands_in_one_folder(tmp_path, text, capsys):
    from posenc.cli.main import main

    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    out = tmp_path / "run"
    with Store(out).lock():
        assert main(["compare", "--preset", str(preset), "--out", str(out), "--text", str(text), "--jobs", "1"]) == 2
    assert f"another command (process {os.getpid()}) is working in" in capsys.readouterr().err
    assert not list(out.glob("trials/*"))
