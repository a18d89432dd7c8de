"""The lab's presets are valid; throughput refuses a wrong result."""

import time

import pytest

from posenc.lab import presets, throughput
from posenc.lab.errors import LabError


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_valid(name):
    experiment = presets.load(name)
    experiment.check()
    trials = experiment.trials("digest")
    assert len({trial.training.key for trial in trials}) == len(trials)
    assert all(t.train in t.test and max(t.test) >= 2 * t.train for t in experiment.tasks)


def test_presets_have_the_documented_settings():
    assert {"smoke", "quick", "full", "paper"} <= set(presets.names())
    quick, paper, full = (presets.load(name) for name in ("quick", "paper", "full"))
    for experiment in (quick, paper):
        for task in experiment.tasks:
            assert len({s.split("+")[0].split(":")[0] for s in task.encodings}) >= 8
    assert quick.device == "cpu" and {t.task for t in quick.tasks} == {"text", "previous"}
    assert paper.device == "cuda" and paper.precision == "bfloat16" and paper.compile
    assert paper.tasks[0].train == 512 and max(paper.tasks[0].test) == 16384 and paper.tasks[0].seeds >= 3
    assert all(t.seeds >= 3 and t.rates for t in full.tasks)


def test_throughput_measures_every_encoding_and_the_textbook():
    began = time.perf_counter()
    speeds = throughput.measure(["shaw", "alibi"], length=32, batch=2, width=16, heads=2, layers=1, rounds=1)
    assert [s.encoding for s in speeds] == ["none", "shaw", "alibi", throughput.TEXTBOOK]
    assert speeds[0].ratio == 1.0 and all(0 < s.seconds < time.perf_counter() - began for s in speeds)
    assert "× none" in throughput.as_text(speeds)
    with pytest.raises(LabError, match="apply to tests only"):
        throughput.measure(["rope+ntk:8"])


def test_throughput_reports_no_speed_of_a_wrong_result(monkeypatch):
    right = throughput.TextbookShaw.forward
    monkeypatch.setattr(throughput.TextbookShaw, "forward", lambda self, x: right(self, x) * 1.5)
    with pytest.raises(LabError, match="no speed is reported"):
        throughput.measure(["shaw"], length=32, batch=2, width=16, heads=2, layers=1, rounds=1)
