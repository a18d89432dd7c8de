"""Long trainings are tested midway: the weights do not notice, resuming keeps the tests, and the report shows the verdicts."""

import pytest

from posenc.lab import corpus, report, train, verdict
from posenc.lab.results import read
from posenc.lab.run import compare
from posenc.lab.run_trial import run_trial
from posenc.lab.store import Store
from posenc.lab.texts import Words


@pytest.fixture
def long_from_10_steps(monkeypatch):
    monkeypatch.setattr(train, "LONG", 10)


def test_the_paper_preset_is_tested_after_1200_and_3000_steps():
    assert train.midway_steps(6000) == (1200, 3000)
    assert train.midway_steps(300) == ()


def test_the_trained_weights_do_not_notice(tiny, tmp_path, text, run_folder, monkeypatch):
    experiment = tiny(tasks=("text",), encodings=["t5"])
    compare(experiment, tmp_path / "without", text=text, jobs=1)
    monkeypatch.setattr(train, "LONG", 10)
    compare(experiment, tmp_path / "with", text=text, jobs=1)
    assert read(tmp_path / "with").rows == read(tmp_path / "without").rows


def test_the_report_shows_verdicts_after_parts_of_the_training(tiny, tmp_path, text, long_from_10_steps):
    compare(tiny(tasks=("text",), steps=20), tmp_path, text=text, jobs=1)
    results = read(tmp_path)
    (task,) = results.tasks()
    assert results.steps(task) == [4, 10, 20]
    early, late = (verdict.midway(results, task, "alibi", step) for step in (4, 20))
    assert early.here.value > late.here.value  # it learned something since
    assert verdict.midway(results, task, "learned", 4).outcome == "missing"  # past its end
    html = report.as_html(results)
    for language in ("en", "zh"):
        assert Words(language)("details steps", task="text") in html
        assert Words(language)("after steps", steps=10) in html


def test_a_run_without_such_tests_has_no_such_table(run_folder):
    assert Words("en")("details steps", task="text") not in report.as_html(read(run_folder))


def test_resuming_keeps_the_tests_midway(tiny, tmp_path, text, long_from_10_steps):
    source = corpus.read(text)
    (trial,) = tiny(tasks=("text",), steps=20, encodings=["alibi"]).trials(source.digest)
    whole, parted = Store(tmp_path / "whole"), Store(tmp_path / "parted")
    run_trial(trial, whole, source)

    def stop(step, loss):
        if step >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(trial, parted, source, progress=stop, checkpoint_seconds=0.0)
    run_trial(trial, parted, source)
    of = lambda store: store.get(trial.training.key, "train.json")["midway"]  # noqa: E731
    assert [test["step"] for test in of(parted)] == [4, 10]
    assert of(parted) == of(whole)
