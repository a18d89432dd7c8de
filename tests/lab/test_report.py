"""Reports: Student's intervals, verdicts that follow the results, one HTML file that needs no network."""

import csv
import json
import re
from xml.etree import ElementTree

import pytest

from posenc.lab import cli, compare_runs, report, results, svg, verdict
from posenc.lab.errors import LabError
from posenc.lab.results import Mean, Results, mean


def made(losses, metric="loss", task="text", train=64, seeds=1):
    """Results with given scores: {encoding: {size: number, reason or list of numbers}}."""
    sizes = sorted({size for points in losses.values() for size in points})
    settings = {"task": task, "train": train, "test": sizes, "lr": 1e-3, "seeds": seeds, "encodings": list(losses)}
    rows = []
    for encoding, points in losses.items():
        for size, value in points.items():
            for seed, one in enumerate(value if isinstance(value, list) else [value]):
                score = {"error": one} if isinstance(one, str) else {metric: one}
                rows.append({"task": task, "encoding": encoding, "seed": seed, "lr": 1e-3, "size": size, **score})
    experiment = {"title": "t", "tasks": [settings], "published": []}
    return Results(experiment, {}, [], rows, 1, 1)


def test_confidence_intervals_are_students():
    assert mean([2.0]) == Mean(2.0, None, 1)
    three = mean([1.0, 2.0, 3.0])
    assert three.value == 2.0 and three.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert mean([1.0] * 40).half == 0.0


def test_the_verdict_follows_the_results():
    run = made({
        "none": {64: 2.0, 256: 2.2}, "sinusoidal": {64: 2.1, 256: 3.0}, "alibi": {64: 1.7, 256: 1.68},
        "learned": {64: 1.9, 256: "learned positions end at max_length=64"}, "rope": {64: 1.6, 256: 2.1},
    })  # fmt: skip
    outcomes = {s.encoding: s.outcome for s in verdict.standings(run, run.tasks()[0])}
    assert outcomes == {
        "none": "loses",
        "sinusoidal": "breaks",
        "alibi": "holds",
        "learned": "cannot",
        "rope": "breaks",
    }
    assert [s.encoding for s in verdict.standings(run, run.tasks()[0])][:2] == ["alibi", "rope"]
    sentences = " ".join(verdict.sentences(run))
    assert "use alibi" in sentences and "rope is best with 1.600" in sentences
    assert "learned cannot run at size 256: learned positions end at max_length=64" in sentences
    assert "One seed" in sentences


def test_an_extension_is_compared_with_the_weights_without_it():
    run = made({"rope": {64: 1.6, 256: 2.1}, "rope+linear:8": {64: 3.2, 256: 3.2}, "rope+yarn:4": {64: 1.7, 256: 1.7}})
    outcomes = {s.encoding: s.outcome for s in verdict.standings(run, run.tasks()[0])}
    assert outcomes == {"rope": "breaks", "rope+linear:8": "breaks", "rope+yarn:4": "loses"}


def test_sliding_windows_have_their_own_sentence():
    run = made({"alibi": {64: 1.7, 256: 1.6}, "t5": {64: 1.6, 256: 1.6}})
    run.tasks()[0]["sliding"] = 16
    for row in run.rows:
        row["sliding"] = 1.5 if row["encoding"] == "alibi" or row["size"] == 64 else 1.9
    sentence = next(s for s in verdict.sentences(run) if "last 16 bytes" in s)
    assert "alibi (+0.000) keeps the quality from 64 to 256; the others change by t5 +0.40." in sentence


def test_accuracy_counts_the_other_way_round():
    run = made({"a": {8: 1.0, 32: 0.99}, "b": {8: 1.0, 32: 0.5}, "c": {8: 0.4, 32: 0.4}}, "accuracy", "copy", 8)
    outcomes = {s.encoding: s.outcome for s in verdict.standings(run, run.tasks()[0])}
    assert outcomes == {"a": "holds", "b": "breaks", "c": "not learnt"}
    assert "use a:" in " ".join(verdict.sentences(run))


def test_when_nothing_holds_nothing_is_recommended():
    run = made({"a": {64: 1.0, 256: 2.0}, "b": {64: 1.0, 256: 1.5}})
    assert "No encoding keeps its quality on every task; b comes nearest." in verdict.sentences(run)


def test_the_files_of_a_report(run_folder):
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    head = page[: page.index("<script>")] + page[page.index("</head>") :]
    assert not re.search(r"""(src|href)=["']?https?:""", page.split("</script>", 1)[1])
    assert "<script src" not in head
    for part in ("rope+ntk:8", "cannot", "Learning-rate check", "peak memory", "&quot;steps&quot;: 12", "±"):
        assert part in head
    figures = json.loads(re.search(r"const figures = (.*);\n", page)[1])
    assert len(figures) == 5  # a task's scores and training; the text's sliding windows
    names = {trace.get("name") for trace in figures[0]["data"]}
    assert {"none", "alibi", "rope", "rope+ntk:8", "learned"} <= names
    rows = list(csv.DictReader((run_folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    saved = json.loads((run_folder / "results.json").read_text())
    assert len(rows) == len(saved["rows"]) == 2 * 2 * 5 * 2 + 2 * 4
    assert {row["encoding"] for row in rows} == {"none", "learned", "alibi", "rope", "rope+ntk:8"}


def test_report_is_rebuilt_from_trials_and_from_json_alone(run_copy, tmp_path, capsys):
    run_folder = run_copy
    before = (run_folder / "results.csv").read_bytes()
    (run_folder / "report.html").unlink()
    assert cli.show_report([str(run_folder)]) == 0
    assert (run_folder / "report.html").exists() and (run_folder / "results.csv").read_bytes() == before
    (tmp_path / "results.json").write_bytes((run_folder / "results.json").read_bytes())
    assert cli.show_report([str(tmp_path)]) == 0
    assert (tmp_path / "results.csv").read_bytes() == before
    assert "Verdict" in capsys.readouterr().out
    with pytest.raises(LabError, match="not the folder of a run"):
        results.read(tmp_path / "nothing")


def test_two_runs_are_compared(run_folder, tmp_path, capsys):
    assert cli.show_report([str(run_folder), str(run_folder), "--out", str(tmp_path / "two.html")]) == 0
    assert "+0.000" in capsys.readouterr().out
    assert "B − A" in (tmp_path / "two.html").read_text(encoding="utf-8")
    a, b = made({"x": {64: [1.0, 1.1], 128: [1.0, 1.1]}}), made({"x": {64: [2.0, 2.1], 128: [1.1, 1.0]}})
    assert [row.differs for row in compare_runs.rows(a, b)] == [False, False]  # two seeds give wide intervals
    a, b = made({"x": {64: [1.0, 1.01, 1.02]}}), made({"x": {64: [2.0, 2.01, 2.02]}})
    assert compare_runs.rows(a, b)[0].differs


def test_without_plotly_the_figures_are_static_pictures(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "plotly_script", lambda: None)
    written = report.save(results.read(run_folder), tmp_path)
    assert [path.name for path in written] == ["results.json", "results.csv", "report.html"]
    page = written[-1].read_text(encoding="utf-8")
    monkeypatch.undo()
    assert page == report.as_html(results.read(run_folder), still=True)
    assert "<script" not in page and "http" not in page and len(page) < 200_000
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == page.count("<svg") == 5  # two tasks: results and training; text: sliding windows too
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert "rope+ntk:8</text>" in pictures[0]


def test_static_pictures_have_the_right_coordinates():
    figure = {
        "data": [{"x": [64, 128, 256], "y": [2.0, None, 1.0], "name": "a", "mode": "lines+markers", "line": {}}],
        "layout": {"xaxis": {"type": "log", "tickvals": [64, 128, 256], "ticktext": ["64", "128", "256"]}},
    }
    picture = ElementTree.fromstring(svg.draw(figure))
    first, last = picture.findall("circle")
    assert float(first.get("cx")) == svg.LEFT and float(last.get("cx")) == svg.WIDTH - svg.RIGHT
    assert svg.TOP < float(first.get("cy")) < float(last.get("cy")) < svg.HEIGHT - svg.BOTTOM  # 2.0 is above 1.0
    labels = {text.text: float(text.get("x")) for text in picture.iter("text")}
    assert labels["128"] == pytest.approx((labels["64"] + labels["256"]) / 2)  # half way, on a log axis
    assert {"1", "1.2", "2"} <= labels.keys()


def test_published_tables_are_compared_with_the_results():
    run = made(
        {"alibi": {512: 1.0, 1024: 0.9, 8192: 0.9, 16384: 0.9}, "rope": {512: 1.0, 1024: 0.9, 16384: 3.0}}, train=512
    )
    page = report.published.as_html("kerple", run)
    assert "agrees" in page and "disagrees: published loses, measured holds" in page and "not measured" in page
    run.experiment["published"] = ["kerple"]
    sentence = verdict.sentences(run)[-1]
    assert sentence.startswith("KERPLE") and "4 of 5 entries agree" in sentence and "rope at 1024" in sentence
    assert "1024: +0.30 / -0.10" in report.as_text(run)
    run = made({"alibi": {512: 1.0, 16384: 0.9}, "t5": {512: 1.1, 16384: 0.8}}, train=512)
    assert report.published.orders("kerple", run) == [
        (512, ["t5", "alibi"], ["alibi", "t5"]),
        (16384, ["alibi", "t5"], ["t5", "alibi"]),
    ]
    assert "at 512 alibi, t5 (published t5, alibi)" in report.published.sentence("kerple", run)


def test_commands_refuse_invalid_arguments():
    with pytest.raises(LabError, match="the presets are"):
        cli.compare(["--preset", "quik"])
    with pytest.raises(LabError, match="--steps 0"):
        cli.compare(["--steps", "0"])
    with pytest.raises(LabError, match="it has previous, text"):
        cli.compare(["--preset", "smoke", "--tasks", "sort"])
    with pytest.raises(LabError, match="goes with two runs"):
        cli.show_report(["x", "--out", "y"])


@pytest.mark.parametrize("option", ["--encodings", "--schemes"])
def test_encodings_are_chosen_by_either_option(option, tmp_path):
    with pytest.raises(ValueError, match="did you mean 'alibi'"):
        cli.compare(["--preset", "smoke", "--out", str(tmp_path), option, "rope", "alibbi"])
