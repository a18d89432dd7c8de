"""Progress: the time left follows the cost of the trials, the live table is drawn, a curve fits in a line."""

import sys

from posenc.lab import progress
from posenc.lab.run import compare
from posenc.lab.store import Store
from posenc.lab.texts import Words
from posenc.lab.worker_processes import Event


def test_the_finished_share(tiny, tmp_path):
    trials = tiny(tasks=("previous",)).trials()
    display = progress.Progress(trials, 0, Store(tmp_path), Words("en"))
    assert display.share == 0 and display.left is None
    display.update(Event(trials[0], trials[0].training.steps // 2, 1.0))
    assert 0 < display.share < 1 / len(trials)
    before = display.share
    for trial in trials:
        display.update(Event(trial))
        assert display.share > before
        before = display.share
    assert abs(display.share - 1) < 1e-9
    assert display.done == display.number == len(trials)


def test_a_terminal_gets_a_live_table(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    drawn = []
    draw = progress.Live.draw
    monkeypatch.setattr(progress.Live, "draw", lambda self: drawn.append(1) or draw(self))
    compare(tiny(tasks=("previous",)), tmp_path, jobs=1)
    assert len(drawn) > 4 * 12  # every step of four trainings
    printed = capsys.readouterr().out
    assert "rope+ntk:8" in printed and "12: cannot" in printed


def test_a_bar_stands_before_the_first_step(tiny, tmp_path, monkeypatch, capsys):
    trials = tiny(tasks=("previous",)).trials()
    with progress.Progress(trials, 0, Store(tmp_path), Words("zh")):
        assert capsys.readouterr().out == f"[0/{len(trials)}] 正在启动：几秒后出现最初的训练步\n"
    drawn = []
    monkeypatch.setattr(progress.Live, "draw", lambda self: drawn.append(1))
    with progress.Live(trials, 0, Store(tmp_path), Words("en")):
        assert drawn == [1]


def test_sparks_and_clocks():
    assert progress.spark([0.0, 7.0]) == "▁█"
    assert progress.spark([float("nan")]) == "" and progress.spark([1.0] * 40) == "▁" * 30
    assert progress.clock(61.4) == "1:01" and progress.clock(7322) == "2:02:02"
