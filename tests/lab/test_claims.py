"""Textbook claims: the arithmetic ones computed, the trained ones on invented results."""

import math

import pytest

from posenc.lab import claims, cli, presets
from posenc.lab.claims import Measured
from posenc.lab.results import Results


def measured(text=None, neighbour=None):
    """The results that the trained claims use, from {encoding: (loss at 1 ×, 2 ×, 4 ×)} and {distance: {k: accuracy}}."""
    task = {"task": "text", "train": 64, "test": [64, 128, 256], "lr": 1.0, "encodings": list(text or {}), "seeds": 1}
    rows = [
        {"task": "text", "encoding": encoding, "seed": 0, "lr": 1.0, "size": size}
        | ({"loss": loss} if math.isfinite(loss) else {"error": "cannot"})
        for encoding, losses in (text or {}).items()
        for size, loss in zip((64, 128, 256), losses)
    ]
    tasks, other = [], []
    for distance, of in (neighbour or {}).items():
        name = f"neighbour:distance={distance}"
        tasks.append(
            {"task": name, "train": 8, "lr": 1.0, "encodings": [f"shaw:max_distance={k}" for k in of], "seeds": 1}
        )
        other += [
            {"task": name, "encoding": f"shaw:max_distance={k}", "seed": 0, "lr": 1.0, "size": 8, "accuracy": a}
            for k, a in of.items()
        ]
    return Measured(
        Results({"tasks": [task]}, {}, [], rows, 0, 0), Results({"tasks": tasks}, {}, [], other, 0, 0), None, None
    )


@pytest.mark.parametrize("number", [0, 1, 4, 8])
def test_arithmetic_claims_are_true(number):
    claim, test = claims.CLAIMS[number]
    finding = test(measured())
    assert finding.verdict == "true", (claim, finding)


def test_t5_buckets_are_those_of_the_specification():
    evidence = claims.t5_near_is_exact(measured()).evidence
    assert "distances 0 to 15" in evidence and "0 to 7 to" in evidence


LOSING = (1.6, 1.8, 2.4)
FLAT = (1.7, 1.69, 1.68)


def test_verdicts_of_trained_claims_follow_the_results():
    assert claims.sinusoidal_extrapolates(measured({"sinusoidal": LOSING})).verdict == "false"
    assert claims.sinusoidal_extrapolates(measured({"sinusoidal": FLAT})).verdict == "true"
    assert claims.rope_extrapolates(measured({"rope": LOSING})).verdict == "false"
    relative = ("alibi", "clipped", "shaw", "t5:max_distance=32", "t5", "rope")
    mixed = claims.relative_extrapolates(measured({s: LOSING if s in ("rope", "t5") else FLAT for s in relative}))
    assert mixed.verdict == "partly" and "t5, rope lose" in mixed.why
    assert claims.relative_extrapolates(measured(dict.fromkeys(relative, FLAT))).verdict == "true"
    extended = claims.rope_extends(measured({"rope": LOSING, **dict.fromkeys(claims.EXTENDED, FLAT)}))
    assert extended.verdict == "true"
    some = {"rope": LOSING, **dict.fromkeys(claims.EXTENDED, FLAT), "rope+linear:4": (2.4, 2.4, 2.4)}
    assert claims.rope_extends(measured(some)).verdict == "partly"


def test_a_small_clip():
    text = {"shaw": FLAT, "shaw:max_distance=2": FLAT}
    near = {0: 0.2, 1: 0.3, 2: 1.0, 4: 1.0, 8: 1.0}
    finding = claims.small_clip_is_enough(measured(text, {1: near, 4: {0: 0.2, 1: 0.2, 2: 0.3, 4: 0.3, 8: 1.0}}))
    assert finding.verdict == "partly" and "k=2 0.30" in finding.evidence
    assert claims.small_clip_is_enough(measured(text, {1: near, 4: near})).verdict == "true"


def test_the_claims_train_what_quick_trains():
    """So that `posenc claims` after `posenc compare` has little left to do."""
    ours = {trial.training.key for trial in claims.text_experiment().trials("x")}
    quick = {trial.training.key for trial in presets.load("quick").trials("x")}
    assert len(ours - quick) == 1  # shaw:max_distance=2


def test_all_of_it_with_tiny_models(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(presets, "load", _tiny(presets.load))
    assert cli.claims(["--out", str(tmp_path), "--text", str(text), "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    table = (tmp_path / "claims.md").read_text(encoding="utf-8")
    for claim, _ in claims.CLAIMS:
        assert claim in printed and claim in table
    table, larger = table.split("\n## With larger models")
    assert table.count("\n| ") == len(claims.CLAIMS) + 2
    assert "| 1,200 steps | 3,000 steps | 6,000 steps |" in larger and "\n| alibi | " in larger


def test_the_published_page_is_the_commands(request):
    page = (request.config.rootpath / "docs" / "claims.md").read_text(encoding="utf-8")
    assert page.startswith(claims.INTRODUCTION)
    assert [line.split(" | ")[0][2:] for line in page.splitlines() if "| **" in line] == [c for c, _ in claims.CLAIMS]


def _tiny(load):
    def made(name):
        small = load(name).change(steps=3, width=16, heads=2, layers=1, batch=4, count=1024)
        if name == "quick":
            return small.change(train=16, test=(16, 32, 64), sliding=0)
        return small

    return made
