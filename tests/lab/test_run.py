"""Runs: killed anywhere they go on, nothing is done twice, workers and this process agree, failures are results."""

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

from posenc.lab import corpus, evaluate, results, train, work, workers
from posenc.lab.errors import LabError
from posenc.lab.presets import from_dict
from posenc.lab.run import compare
from posenc.lab.store import Store


def records(folder, kind):
    return {p.name: json.loads(p.read_text()) for p in sorted(Path(folder, "cells").glob(f"*.{kind}.json"))}


def test_a_second_run_computes_nothing_and_more_schemes_only_what_is_new(tiny, tmp_path, text, monkeypatch):
    first = compare(tiny(), tmp_path, text=text, jobs=1)
    assert first.finished == first.wanted == 8
    calls = []
    trained, tested = train.train, evaluate.evaluate
    monkeypatch.setattr(work, "train", lambda *a, **k: calls.append("train") or trained(*a, **k))
    monkeypatch.setattr(work, "evaluate", lambda *a, **k: calls.append("test") or tested(*a, **k))
    again = compare(tiny(), tmp_path, text=text, jobs=1)
    assert not calls and again.rows == first.rows
    compare(tiny().change(schemes=("rope", "rope+linear:2")), tmp_path, text=text, jobs=1)
    assert calls == ["test", "test"]  # one a task, on the same weights
    calls.clear()
    compare(tiny(tasks=("previous",)).change(schemes=("rope",), lr=5e-3), tmp_path, jobs=1)
    assert calls == ["train", "test"]


def test_learned_positions_say_that_they_end(tiny, tmp_path, text):
    found = compare(tiny(tasks=("text",)).change(schemes=("learned",)), tmp_path, text=text, jobs=1)
    here, far = found.rows
    assert here["loss"] > 0 and "error" not in here
    assert "max_len=16" in far["error"] and "loss" not in far


def test_workers_and_this_process_give_the_same_numbers(tiny, tmp_path, text):
    a = compare(tiny(), tmp_path / "a", text=text, jobs=1)
    b = compare(tiny(), tmp_path / "b", text=text, jobs=2)
    assert a.rows == b.rows
    assert [t["curve"] for t in a.trainings] == [t["curve"] for t in b.trainings]


def test_going_on_from_a_checkpoint_equals_never_stopping(tiny, tmp_path, text):
    words = corpus.read(text)
    for cell in tiny().change(steps=20, schemes=("t5", "none")).cells(words.digest):
        whole = train.train(cell.training, Store(tmp_path / "whole"), words, checkpoint_seconds=0)
        store = Store(tmp_path / "cut")

        class Cut(Exception):
            pass

        def stop(step, loss):
            if step == 13:
                raise Cut

        with pytest.raises(Cut):
            train.train(cell.training, store, words, progress=stop, checkpoint_seconds=0)
        seen = []
        rest = train.train(cell.training, store, words, progress=lambda step, _, seen=seen: seen.append(step))
        assert seen[0] == 13  # the checkpoint of step 12 was kept, nothing before it is done again
        assert rest["curve"] == whole["curve"]
        key = cell.training.key
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
schemes = ["none", "alibi", "rope", "rope+ntk:8"]
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


def test_killed_at_any_moment_it_goes_on(tmp_path, text):
    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    out = tmp_path / "run"
    for delay, jobs in ((0.05, "2"), (0.3, "1")):
        process = start(preset, out, text, "--jobs", jobs)
        before = time.time()
        while not list(out.glob("cells/*.json")) and time.time() - before < 300 and process.poll() is None:
            time.sleep(0.02)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()  # until its workers have gone too
    kept = {**records(out, "train"), **records(out, "test")}  # what is there is whole: it parses
    stamps = {name: (out / "cells" / name).stat().st_mtime_ns for name in kept}
    assert kept
    process = start(preset, out, text, "--jobs", "1")
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert len(records(out, "train")) == 6 and len(records(out, "test")) == 8
    for name, stamp in stamps.items():
        assert (out / "cells" / name).stat().st_mtime_ns == stamp, "a finished result was computed again"
    assert results.read(out).finished == 6
    assert "Verdict" in said


def test_a_worker_that_dies_is_replaced_and_one_that_dies_twice_is_told(tiny, tmp_path):
    cells = tiny(tasks=("previous",)).change(schemes=("alibi",)).cells()
    cells += tiny(tasks=("previous",)).change(steps=1000, schemes=("none",)).cells()
    store = Store(tmp_path)
    steps = []
    with pytest.raises(LabError, match="died twice"):
        for event in workers.run(cells, store, None, jobs=1):
            if event.step is None:
                for idle in multiprocessing.active_children():
                    idle.kill()  # it has nothing to do now: nothing is lost
                    idle.join()
            elif event.cell == cells[1]:
                steps.append(event.step)
                for child in multiprocessing.active_children():
                    child.kill()
    assert store.has(cells[0].training.key, "train.json") and not store.has(cells[1].training.key, "train.json")
    assert steps


def test_a_training_that_diverges_is_a_result(tiny, tmp_path, text):
    experiment = tiny(tasks=("text",)).change(schemes=("none",), lr=1e30, steps=60)
    found = compare(experiment, tmp_path, text=text, jobs=1)
    assert found.trainings[0]["status"].startswith("diverged at step")
    assert all(row["error"].startswith("diverged") for row in found.rows)
    assert found.finished == 1


def test_texts_never_mix(tiny, tmp_path, text):
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    experiment = tiny(tasks=("text",)).change(schemes=("none",))
    a = compare(experiment, tmp_path / "run", text=text, jobs=1)
    b = compare(experiment, tmp_path / "run", text=other, jobs=1)
    assert a.rows != b.rows
    assert len(records(tmp_path / "run", "train")) == 2


def test_the_standard_library_is_read_the_same_way_twice():
    a, b = corpus.read(), corpus.read()
    assert a == b and a.digest == b.digest
    assert len(a.train) > 2_000_000 and len(a.held_out) > 200_000
    assert b"import " in a.held_out


def test_what_cannot_be_asked(tiny, tmp_path):
    with pytest.raises(LabError, match="--jobs 0"):
        compare(tiny(), tmp_path, jobs=0)
    with pytest.raises(LabError, match="use here, ray"):
        compare(tiny(), tmp_path, on="slurm")
    with pytest.raises(ValueError, match="unknown scheme"):
        compare(tiny().change(schemes=("ropee",)), tmp_path)
    with pytest.raises(LabError, match="cannot read the text"):
        compare(tiny(), tmp_path, text=tmp_path / "none.txt")
    with pytest.raises(LabError, match=r"\[\[tasks\]\]"):
        from_dict({"schemes": ["none"]}, "x")
    with pytest.raises(LabError, match="unknown settings stepz"):
        from_dict({"tasks": [{"task": "copy", "stepz": 3}]}, "x")
    with pytest.raises(LabError, match="train, test, steps, schemes missing"):
        from_dict({"tasks": [{"task": "copy"}]}, "x")
    with pytest.raises(LabError, match="steps='3' must be int"):
        from_dict({"tasks": [{"task": "copy", "train": 1, "test": [1], "schemes": ["none"], "steps": "3"}]}, "x")


def test_a_learning_rate_check_adds_cells(tiny):
    plain = tiny(tasks=("previous",))
    checked = plain.change(rates=(0.5, 2.0))
    more = [cell for cell in checked.cells() if cell not in plain.cells()]
    assert {cell.training.lr for cell in more} == {5e-4, 2e-3}
    assert {cell.training.scheme for cell in more} == {"none", "learned", "alibi", "rope"}
    assert replace(more[0].training, lr=1e-3).key in {cell.training.key for cell in plain.cells()}


def test_what_cannot_be_compiled_is_trained_without_and_says_so(tiny, tmp_path, monkeypatch):
    cell = tiny(tasks=("previous",)).change(schemes=("alibi",)).cells()[0]

    def broken(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    plain = train.train(cell.training, Store(tmp_path))
    tried = train.train(replace(cell.training, compile=True), Store(tmp_path))
    assert plain["compile"] == "not asked for"
    assert tried["compile"] == "failed, trained without: RuntimeError: no compiler here"
    assert tried["curve"] == plain["curve"]


def test_damaged_files_are_made_again(tiny, tmp_path, text):
    experiment = tiny(tasks=("text",)).change(schemes=("t5",))
    first = compare(experiment, tmp_path, text=text, jobs=1)
    (trained,), (tested,), (weights,) = (
        list(tmp_path.glob(f"cells/*.{kind}")) for kind in ("train.json", "test.json", "weights")
    )
    whole = {path: path.read_bytes() for path in (trained, tested, weights)}
    for damaged in ((trained,), (tested,), (weights, tested), (trained, tested, weights)):
        for path in damaged:
            path.write_bytes(whole[path][: len(whole[path]) // 2])
        again = compare(experiment, tmp_path, text=text, jobs=1)
        assert again.finished == 1 and again.rows == first.rows
        assert weights.read_bytes() == whole[weights] or weights not in damaged
    # a damaged checkpoint is no start
    cell = experiment.cells(corpus.read(text).digest)[0]
    for path in whole:
        path.unlink()
    Store(tmp_path).path(cell.training.key, "checkpoint").write_bytes(whole[weights][:-1])
    assert compare(experiment, tmp_path, text=text, jobs=1).rows == first.rows


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_that_fails_stops_no_other(tmp_path, text, jobs):
    """A scheme that breaks in the middle of training, in this process and in a worker."""
    from posenc.lab.errors import CellFailure

    broken = {
        "title": "broken", "seeds": 1, "batch": 2, "width": 16, "heads": 2, "layers": 1, "steps": 4, "count": 64,
        "schemes": ["none", "learned:max_len=4", "alibi"],
        "tasks": [{"task": "text", "train": 16, "test": [16]}],
    }  # fmt: skip
    with pytest.raises(CellFailure, match="learned:max_len=4 failed.*\n[^$]*max_len=4"):
        compare(from_dict(broken, "broken"), tmp_path, text=text, jobs=jobs)
    found = results.read(tmp_path)
    assert found.finished == 2 and found.wanted == 3
    assert "only 2 of 3 cells" in (tmp_path / "report.html").read_text().lower()


def test_the_command_tells_failed_cells_without_its_own_traceback(tmp_path, text, capsys, monkeypatch):
    from posenc.lab import cli

    def broken(*_, **__):
        raise ZeroDivisionError("in the middle")

    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    monkeypatch.setattr(work, "train", broken)
    arguments = ["--preset", preset, "--out", tmp_path / "run", "--text", text, "--jobs", "1", "--schemes", "none"]
    assert cli.compare([*map(str, arguments), "--seeds", "1"]) == 1
    said = capsys.readouterr().err
    assert "text, none failed" in said and "ZeroDivisionError: in the middle" in said and "report.html" in said


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of a file")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_no_room_for_the_weights(tmp_path, text, jobs):
    """A limit that records fit in and weights do not: said in a sentence, and the same command goes on."""
    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
    limited += "from posenc.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["compare", "--preset", preset, "--out", tmp_path / "run", "--text", text, "--jobs", jobs]
    said = subprocess.run(
        [sys.executable, "-c", limited, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=600
    )
    assert said.returncode == 2 and "cannot write" in said.stderr and "Traceback" not in said.stderr, said.stderr
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.train.json"))


def test_two_commands_in_one_folder(tmp_path, text):
    preset = tmp_path / "kill.toml"
    preset.write_text(PRESET)
    out = tmp_path / "run"
    first = start(preset, out, text, "--jobs", "1", "--steps", "100000")
    try:
        while not (out / "settings.json").exists() and first.poll() is None:
            time.sleep(0.02)
        second = start(preset, out, text, "--jobs", "1")
        said = second.communicate(timeout=300)[0]
        assert second.returncode == 2 and f"another command (process {first.pid})" in said
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
