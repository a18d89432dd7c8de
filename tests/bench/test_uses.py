"""The suite of uses: its runner, and the agreement of the layers written by hand with ours."""

import json
import time
from functools import partial

import pytest
import torch

from docs.site import uses_page
from posenc.bench import uses, uses_calls, uses_layers, uses_models, uses_suite
from posenc.bench.uses import OURS, Cell, Contest


def work(seconds):
    """Of this thread's own time, which is what a single thread is measured by."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def contest(error=0.0, ours=0.0, other=0.0):
    return Contest(
        lambda: work(ours), {"fast": lambda: work(other), "slow": lambda: work(2 * other)}, lambda: (error, 1e-3)
    )


def broken():
    raise RuntimeError("no such kernel\nand more")


CELLS = [
    Cell("a/good/1x16/forward", partial(contest, ours=0.002, other=0.001)),
    Cell("a/wrong/1x16/forward", partial(contest, error=0.1)),
    Cell("b/broken/1x16/step", broken),
    Cell("b/faster/1x16/step", partial(contest, ours=0.001, other=0.002)),
]


def test_a_failed_cell_is_reported_and_the_run_goes_on(tmp_path):
    lines = []
    path = tmp_path / "uses.json"
    result = uses.run(
        CELLS, "cpu", path, machine={"cpu": "x"}, budget=0.02, show=lambda text, done: lines.append((text, done))
    )
    assert json.loads(path.read_text()) == result
    cells = result["cells"]
    assert cells["a/good/1x16/forward"]["ratio"] > 1.2
    assert cells["a/good/1x16/forward"]["best"] == "fast"
    assert cells["b/faster/1x16/step"]["ratio"] < 0.8
    assert "results differ by 1.0e-01" in cells["a/wrong/1x16/forward"]["failed"]
    assert cells["b/broken/1x16/step"]["failed"] == "RuntimeError: no such kernel"
    assert [done for _, done in lines] == [0.25, 0.5, 0.75, 1.0]
    text = uses.summary(result).splitlines()
    assert sum(line.startswith("FAILED") for line in text) == 2
    assert "2 cells, 1 above 1.05" in uses.summary(result)
    assert text[-1].startswith("worst: a/good/1x16/forward")


def test_a_run_continues_with_what_is_missing_and_keeps_the_rest(tmp_path):
    path = tmp_path / "uses.json"
    measure = partial(uses.run, device="cpu", path=path, machine={"cpu": "x"}, budget=0.01)
    first = measure(CELLS[:1])["cells"]
    seen = []
    both = measure([CELLS[0], CELLS[3]], missing=True, show=lambda text, done: seen.append(text))["cells"]
    assert len(seen) == 1
    assert both["a/good/1x16/forward"] == first["a/good/1x16/forward"]
    late = measure(CELLS, limit=-1.0)
    assert late["not run"] == [CELLS[1].name, CELLS[2].name]  # the others have figures
    assert "not run, for lack of time: 2 cells" in uses.summary(late)
    other = uses.run(CELLS[3:], "cpu", path, machine={"cpu": "another"}, budget=0.01)
    assert list(other["cells"]) == ["b/faster/1x16/step"]


def test_runs_with_a_limit_reach_every_cell(tmp_path, monkeypatch):
    """Each run measures one cell: what has no figure comes first, then what misses its goal, then the oldest."""
    monkeypatch.setattr(uses, "GOAL", 1e9)
    cells = [Cell(f"a/{name}/1x16/forward", partial(contest, ours=1e-5, other=1e-5)) for name in "pqr"]
    measured: list[str] = []
    clock = iter(range(100))
    monkeypatch.setattr(uses.time, "monotonic", lambda: next(clock))
    minutes = iter(range(100))
    monkeypatch.setattr(uses.time, "strftime", lambda *_: f"2026-01-01 00:{next(minutes):02}")
    run = partial(uses.run, device="cpu", path=tmp_path / "uses.json", machine={"cpu": "x"}, budget=0.001, limit=2)
    for left in (["q", "r"], ["r"], [], []):
        result = run(cells, show=lambda text, done: measured.append(text.split("/")[1]))
        assert [name.split("/")[1] for name in result["not run"]] == left
    assert measured == ["p", "q", "r", "p"]
    monkeypatch.setattr(uses, "GOAL", 0.0)
    good = {"ratio": 1.0, "date": "2026-01-01 00:03", "above_us": 10.0, "goal_us": 60.0}
    missed = [{"ratio": 1.0, "date": f"2026-01-0{day} 00:04"} for day in (1, 3)]
    assert sorted([missed[1], good, missed[0], {}], key=lambda record: uses._turn(record, {})) == [
        {},
        missed[0],
        good,
        missed[1],
    ]


def test_parts_are_merged(tmp_path):
    cells = [Cell(f"a/{name}/1x16/forward", partial(contest, ours=1e-5, other=1e-5)) for name in "pqrst"]
    parts = [uses.take_part(cells, f"{number}/2") for number in (1, 2)]
    assert [len(part) for part in parts] == [3, 2]
    assert sorted(cell.name for part in parts for cell in part) == [cell.name for cell in cells]
    results = [
        uses.run(part, "cpu", tmp_path / f"{number}.json", machine={"cpu": "x"}, budget=0.001)
        for number, part in enumerate(parts)
    ]
    results[0]["not run"] = [cells[1].name, "a/never/1x16/forward"]
    both = uses.merge(results)
    assert set(both["cells"]) == {cell.name for cell in cells}
    assert both["not run"] == ["a/never/1x16/forward"]
    later = {
        **results[0],
        "date": "2099-01-01 00:00",
        "cells": {cells[0].name: {"ratio": 7.0, "date": "2099-01-01 00:00"}},
    }
    for order in ([later, *results], [*results, later]):
        assert uses.merge(order)["cells"][cells[0].name]["ratio"] == 7.0
    with pytest.raises(ValueError, match="cannot be merged"):
        uses.merge([results[0], {**results[1], "machine": {"cpu": "y"}}])
    assert uses.is_same_machine({"gpu": "x", "threads": 1}, {"gpu": "x", "threads": 16}, "cuda")
    assert not uses.is_same_machine({"cpu": "x", "threads": 1}, {"cpu": "x", "threads": 16}, "cpu")
    for wrong in ("3/2", "0/2", "x", "1"):
        with pytest.raises(ValueError, match="--part"):
            uses.take_part(cells, wrong)


def test_selection_by_pattern_or_part():
    names = [cell.name for cell in uses.select(CELLS, ["a/*/forward", "broken"])]
    assert names == ["a/good/1x16/forward", "a/wrong/1x16/forward", "b/broken/1x16/step"]
    assert uses.select(CELLS, None) == CELLS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_cell_has_its_own_name(device):
    names = [cell.name for cell in uses_suite.all_cells(device)]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(uses_layers.BY_HAND))
def test_layers_by_hand_compute_what_ours_do(name, dtype):
    for make in (
        partial(uses_layers.whole_text, name, 2, 20, False, "cpu", dtype),
        partial(uses_layers.whole_text, name, 1, 36, True, "cpu", dtype),
        partial(uses_layers.one_token, name, 24, "cpu", dtype),
    ):
        error, allowed = make().check()
        assert error <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_layers_by_hand_compute_what_ours_do(dtype):
    for use, names in {
        "padded": uses_layers.PADDED,
        **{use: one for use, (one, _) in uses_layers.OTHER_USES.items()},
    }.items():
        for name in names:
            for batch, length, training in ((3, 20, False), (1, 90, True)):
                error, allowed = uses_layers.whole_text(name, batch, length, training, "cpu", dtype, use).check()
                assert error <= allowed, (use, name, training)
    for name in ("none", "rope", "alibi", "t5"):
        for batch, count, padded in ((3, 1, True), (1, 4, False)):
            error, allowed = uses_layers.one_token(name, 24, "cpu", dtype, batch, count, padded).check()
            assert error <= allowed, (name, batch)


@pytest.mark.parametrize("name", uses_calls.PER_HEAD)
def test_calls(name):
    for training in (False, True):
        error, allowed = uses_calls.one_call(name, 2, 3, 24, 16, training, "cpu").check()
        assert error <= allowed
    if name not in ("deberta", "transformer_xl"):
        error, allowed = uses_calls.one_query(name, 2, 8, 2, 60, 16, "cpu").check()
        assert error <= allowed


def test_windows():
    for training in (False, True):
        cell = Cell("windows", partial(uses_calls.windows, 4, 3, 2, 8, training, "cpu"))
        record = uses.measure(cell, "cpu", 0.01)
        assert record["error"] < 1e-5
        assert record["engine"]


def test_a_host_cell_reports_what_stands_above_plain_attention():
    cell = Cell("host", partial(uses_calls.one_call, "t5", 1, 2, 16, 8, True, "cpu"), "host", 250.0)
    record = uses.measure(cell, "cpu", 0.01)
    assert record["above_us"] == pytest.approx((record["ours"] - record["floor"]) * 1e6)


def test_ratios_of_a_gpu_are_those_of_the_rounds(monkeypatch):
    """The host's speed changes between rounds, for all contenders alike: what stands beside each other is compared."""
    speeds = {
        OURS: [1.0, 20.0, 1.0, 20.0, 1.0],
        "other": [2.0, 40.0, 2.0, 40.0, 2.0],
        "floor": [0.5, 19.5, 0.5, 19.5, 0.5],
    }
    monkeypatch.setattr(uses, "_rounds", lambda *_: speeds)
    made = Contest(lambda: None, {"other": lambda: None}, lambda: (0.0, 1.0), floor=lambda: None)
    record = uses.measure(Cell("host", lambda: made, "host", 60.0), "cuda", 0.01)
    assert record["ratio"] == 0.5
    assert record["above_us"] == 0.5e6
    assert uses.ranked_ratios({"host": record, "a": {"ratio": 2.0}, "b": {"failed": "x"}}) == [(2.0, "a")]


def test_cells_are_warmed_beside_those_that_share_their_kernels():
    names = [cell.name for cell in uses_suite.all_cells("cuda")]
    shares = uses_suite.share_out(names, 8)
    assert sorted(name for share in shares for name in share) == sorted(names)
    for kind in ("/t5/", "/deberta/", "/shaw/"):
        assert sum(any(kind in name for name in share) for share in shares) == 1
    assert max(sum("compiled/" in name for name in share) for share in shares) == 2


@pytest.mark.slow
def test_models_and_changing_lengths():
    pytest.importorskip("transformers")
    record = uses.measure(Cell("m", partial(uses_models.one_token, "bloom", 20, "cpu")), "cpu", 0.01)
    assert record["error"] < 1e-4
    found = uses_models.step_through_lengths("cpu", 1, (8, 16), 1)
    assert found["error"] < 1e-4
    assert set(found["longest"]) == {OURS, uses_models.THEIRS}


def test_the_page_names_gains_losses_and_failures(tmp_path):
    path = tmp_path / "uses.json"
    machine = {"cpu": "some CPU", "threads": 1, "torch": "2.0"}
    text = uses_page.page([uses.run(CELLS, "cpu", path, machine=machine, budget=0.01)])
    assert "## some CPU, 1 thread\n" in text
    assert "2 cells: best 0." in text
    assert "| good | **" in text
    assert "| wrong | failed |" in text
    assert "- b/broken/1x16/step: RuntimeError: no such kernel" in text
    assert "### Above 1.05\n\n- a/good/1x16/forward, " in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_readme_counts_every_group_of_the_published_runs(device):
    from docs.site import tables

    assert {record["group"] for record in tables.uses(device)["cells"].values()} <= set(tables.USES)
