"""Progress: the time left follows the work, the live table is drawn, a curve fits in a line."""

import sys

from posenc.lab import progress
from posenc.lab.run import compare
from posenc.lab.store import Store
from posenc.lab.workers import Event


def test_the_share_of_work(tiny, tmp_path):
    cells = tiny(tasks=("previous",)).cells()
    shown = progress.Progress(cells, 0, Store(tmp_path))
    assert shown.share == 0 and shown.left is None
    shown.see(Event(cells[0], cells[0].training.steps // 2, 1.0))
    assert 0 < shown.share < 1 / len(cells)
    before = shown.share
    for cell in cells:
        shown.see(Event(cell))
        assert shown.share > before
        before = shown.share
    assert abs(shown.share - 1) < 1e-9
    assert shown.done == shown.number == len(cells)


def test_a_terminal_gets_a_live_table(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    drawn = []
    draw = progress.Live.draw
    monkeypatch.setattr(progress.Live, "draw", lambda self: drawn.append(1) or draw(self))
    compare(tiny(tasks=("previous",)), tmp_path, jobs=1)
    assert len(drawn) > 4 * 12  # every step of four trainings
    said = capsys.readouterr().out
    assert "rope+ntk:8" in said and "12: cannot" in said


def test_sparks_and_clocks():
    assert progress.spark([0.0, 7.0]) == "▁█"
    assert progress.spark([float("nan")]) == "" and progress.spark([1.0] * 40) == "▁" * 30
    assert progress.clock(61.4) == "1:01" and progress.clock(7322) == "2:02:02"
