"""Reports: Student's intervals, verdicts that follow the results, one HTML file that needs no network."""

import csv
import html
import json
import re
from itertools import pairwise
from pathlib import Path
from string import Formatter
from xml.etree import ElementTree

import pytest

from posenc.lab import answer, cli, compare_runs, evidence, lines, published, report, results, svg, texts, verdict
from posenc.lab.errors import LabError
from posenc.lab.results import Mean, Results, mean
from posenc.lab.texts import Words

ENGLISH = Words("en")
DOCS = Path(__file__).parents[2] / "docs" / "results"


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
    here, far, sure = answer.answers(run, ENGLISH)
    assert here.bold == "At the training length, 64 bytes: rope (1.600 nats per byte)."
    assert "Next: alibi 1.700, learned 1.900 and none 2.000." in here.more
    assert far.bold == "Past it, to 256 bytes (4 ×): alibi. It alone holds (1.700 → 1.680 nats per byte)."
    assert "one seed, so differences under 0.05 nats per byte are noise; what breaks loses 0.50 or more" in sure.bold
    assert "learned positions end at max_length=64" in report.as_html(run)


def test_an_extension_is_compared_with_the_weights_without_it():
    run = made({"rope": {64: 1.6, 256: 2.1}, "rope+linear:8": {64: 3.2, 256: 3.2}, "rope+yarn:4": {64: 1.7, 256: 1.7}})
    outcomes = {s.encoding: s.outcome for s in verdict.standings(run, run.tasks()[0])}
    assert outcomes == {"rope": "breaks", "rope+linear:8": "breaks", "rope+yarn:4": "loses"}


def test_sliding_windows_have_their_own_sentence():
    run = made({"alibi": {64: 1.7, 256: 1.6}, "t5": {64: 1.6, 256: 1.6}})
    run.tasks()[0]["sliding"] = 16
    for row in run.rows:
        row["sliding"] = 1.5 if row["encoding"] == "alibi" or row["size"] == 64 else 1.9
    page = report.as_html(run)
    assert "From 64 to 256 alibi (+0.000) keeps its quality here. Changes of the others: t5 +0.40." in page
    assert "这里从 64 到 256，alibi (+0.000) 保持。其余的变化：t5 +0.40。" in page


def test_accuracy_counts_the_other_way_round():
    run = made({"a": {8: 1.0, 32: 0.99}, "b": {8: 1.0, 32: 0.5}, "c": {8: 0.4, 32: 0.4}}, "accuracy", "copy", 8)
    outcomes = {s.encoding: s.outcome for s in verdict.standings(run, run.tasks()[0])}
    assert outcomes == {"a": "holds", "b": "breaks", "c": "not learnt"}
    assert answer.answers(run, ENGLISH)[1].bold == (
        "Past it, to size 32 (4 ×): a. It alone holds (1.000 → 0.990 of the answers right)."
    )


def test_when_nothing_holds_nothing_is_recommended():
    run = made({"a": {64: 1.0, 256: 2.0}, "b": {64: 1.0, 256: 1.5}})
    assert answer.answers(run, ENGLISH)[1].bold == (
        "Past it, to 256 bytes (4 ×): none holds; b comes nearest (1.000 → 1.500 nats per byte)."
    )


def test_the_files_of_a_report(run_folder):
    page = (run_folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=""", page) and "http" not in page and len(page) < 400_000
    for part in ("cannot run", "Learning-rate check", "学习率检查", "peak memory", "&quot;steps&quot;: 12", "±"):
        assert part in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for picture in pictures:
        ElementTree.fromstring(picture)
    drawn = [re.findall(r'<text[^>]*class="end">([^<]*)</text>', picture) for picture in pictures]
    assert {name.split()[0] for name in drawn[1]} == {"none", "alibi", "rope", "rope+ntk:8", "learned"}
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
    assert "Answer" in capsys.readouterr().out
    with pytest.raises(LabError, match="not the folder of a run"):
        results.read(tmp_path / "nothing")


def test_the_language_of_the_commands(run_copy, capsys):
    assert cli.show_report([str(run_copy), "--lang", "zh"]) == 0
    assert "报告：" in capsys.readouterr().out
    assert '<body data-given="zh">' in (run_copy / "report.html").read_text(encoding="utf-8")
    assert cli.show_report([str(run_copy), str(run_copy), "--lang", "zh"]) == 0
    printed = capsys.readouterr().out
    assert "差别最大的" in printed and "置信区间" in printed
    with pytest.raises(SystemExit):
        cli.show_report([str(run_copy), "--lang", "fr"])


def test_two_runs_are_compared(run_folder, tmp_path, capsys):
    assert cli.show_report([str(run_folder), str(run_folder), "--out", str(tmp_path / "two.html")]) == 0
    assert "+0.000" in capsys.readouterr().out
    assert "B − A" in (tmp_path / "two.html").read_text(encoding="utf-8")
    a, b = made({"x": {64: [1.0, 1.1], 128: [1.0, 1.1]}}), made({"x": {64: [2.0, 2.1], 128: [1.1, 1.0]}})
    assert [row.differs for row in compare_runs.rows(a, b)] == [False, False]  # two seeds give wide intervals
    a, b = made({"x": {64: [1.0, 1.01, 1.02]}}), made({"x": {64: [2.0, 2.01, 2.02]}})
    assert compare_runs.rows(a, b)[0].differs


def test_the_page_has_both_languages_and_needs_no_script(run_folder, tmp_path):
    run = results.read(run_folder)
    written = report.save(run, tmp_path, still=True, language="zh")
    assert [path.name for path in written] == ["results.json", "results.csv", "report.html"]
    page = written[-1].read_text(encoding="utf-8")
    assert "<script" not in page and page.startswith('<!doctype html><html lang="zh-Hans">')
    assert 'id="lang-zh" value="zh-Hans" checked="checked"' in page
    english, chinese = re.findall(r'<main class="lab (?:en|zh)".*?</main>', page, re.DOTALL)
    for part in ("rope+ntk:8", "±"):
        assert part in english and part in chinese
    assert not re.search("[\u4e00-\u9fff]", re.sub(r"<pre.*?</pre>", "", english, flags=re.DOTALL))
    assert english.count("<details") == chinese.count("<details") >= 5 and "<details open" not in page


def test_every_text_is_complete_in_both_languages():
    for key, both in texts.TEXTS.items():
        fields = [{name for _, name, *_ in Formatter().parse(text) if name is not None} for text in both]
        assert fields[0] == fields[1], key
        assert all(both) or key == "space", key
        assert both[0].isascii() or not re.search("[\u4e00-\u9fff]", both[0]), key


def test_a_figure_has_the_right_coordinates_and_labels_apart():
    style = lines.styles(["a"])["a"]
    curves = [svg.Line("a", [64, 128, 256], [2.0, None, 1.0], style), svg.Line("b", [64, 256], [1.5, 1.001], style)]
    panel = svg.Panel("t", "x", "y", curves, ticks=[64, 128, 256], trained=64, trained_label="trained")
    picture = ElementTree.fromstring(svg.draw(panel))
    first = picture.findall("g")[0]
    markers = [re.findall(r"[-.\d]+", g.get("transform")) for g in first.findall("g")]
    (x0, y0), (x1, y1) = ((float(x), float(y)) for x, y in markers)
    assert x0 < x1 and y0 < y1  # 2.0 is above 1.0
    labels = {text.text: (float(text.get("x")), float(text.get("y"))) for text in picture.iter("text")}
    assert labels["128"][0] == pytest.approx(
        (labels["64"][0] + labels["256"][0]) / 2, abs=0.11
    )  # half way, on a log axis
    assert {"1", "1.5", "2"} <= labels.keys()
    assert abs(labels["a 1.000"][1] - labels["b 1.001"][1]) >= svg.LINE - 0.1


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_labels_are_moved_apart_and_stay_inside(count):
    wanted = [100.0 + (n * 37 % 11) for n in range(count)]
    places = svg._spread(wanted, 50.0, 500.0)
    order = sorted(range(count), key=lambda n: wanted[n])
    assert all(places[b] - places[a] >= svg.LINE - 1e-6 for a, b in pairwise(order))
    assert min(places) >= 50.0 and max(places) <= 500.0
    assert svg._spread([60.0, 300.0], 50.0, 500.0) == [60.0, 300.0]  # nothing moves without need


def test_published_tables_are_compared_with_the_results():
    run = made(
        {"alibi": {512: 1.0, 1024: 0.9, 8192: 0.9, 16384: 0.9}, "rope": {512: 1.0, 1024: 0.9, 16384: 3.0}}, train=512
    )
    page = published.as_html("kerple", run)
    assert "agrees" in page and "disagrees: published loses, measured holds" in page and "not measured" in page
    run.experiment["published"] = ["kerple"]
    sentence = published.sentence("kerple", run)
    assert sentence.startswith("KERPLE") and "4 of 5 entries agree" in sentence and "rope at 1024" in sentence
    assert "1024: +0.30 / -0.10" in report.as_text(run)
    run = made({"alibi": {512: 1.0, 16384: 0.9}, "t5": {512: 1.1, 16384: 0.8}}, train=512)
    assert published.orders("kerple", run) == [
        (512, ["t5", "alibi"], ["alibi", "t5"]),
        (16384, ["alibi", "t5"], ["t5", "alibi"]),
    ]
    assert "at 512 alibi, t5 (published t5, alibi)" in published.sentence("kerple", run)


# ---- the answer of a small run and the stronger evidence ----------------------------------------------------------
def strongest_standings():
    run = evidence.strongest()
    return verdict.standings(run, run.tasks()[0])


def test_a_small_run_quotes_the_stronger_evidence():
    run = results.read(DOCS / "quick")
    here, far, sure = answer.answers(run, ENGLISH)
    assert "t5:max_distance=32, shaw, clipped and t5, all level (1.590 to 1.603" in here.bold
    best = strongest_standings()[0]
    assert far.bold == (
        f"Past it: {best.encoding}. In larger models, on an H200, it holds: {best.change} from 512 to 16,384 bytes."
    )
    assert "to 512 bytes shaw, t5:max_distance=32, clipped and alibi hold. But in the larger ones" in far.more
    assert "shaw and clipped break" in far.more
    assert "Trust the larger run: 28 × the parameters (10.8 M), 137 × the training text" in far.more
    assert (
        "On previous (name the symbol just before) shaw and clipped hold, alibi and none do not learn it." in far.more
    )
    entries = [
        row
        for name in ("alibi", "kerple", "cable")
        for row in published.rows(name, evidence.strongest())
        if row[3] is not None
    ]
    agree = sum(published.outcomes_agree(row[2], row[3]) for row in entries)
    assert (
        f"{agree} of {len(entries)} entries of the published tables (ALiBi, KERPLE and CABLE) agree with the larger run"
        in sure.more
    )
    assert agree >= 35


def test_the_strongest_run_stands_for_itself():
    run = results.read(DOCS / "paper")
    assert evidence.stronger_than(run) is None
    best = strongest_standings()[0]
    found = answer.answers(run, ENGLISH)
    if run.finished < run.wanted:  # it says so first
        assert f"{run.finished} of {run.wanted} trials" in found.pop(0).bold
    assert found[1].bold == (
        f"Past it, to 16,384 bytes (32 ×): {best.encoding}. It holds ({best.change} nats per byte)."
    )


def test_the_evidence_is_the_run_in_the_documents():
    saved = json.loads((DOCS / "paper" / "results.json").read_text())
    assert json.loads(evidence.FILE.read_text()) == evidence.without_curves(saved)


def test_a_run_that_agrees_and_a_run_without_the_best():
    shape = {"layers": 2, "width": 32, "steps": 10, "batch": 4}
    best = strongest_standings()[0].encoding
    agreeing = made({best: {64: 1.7, 512: 1.7}, "rope": {64: 1.6, 512: 2.1}})
    agreeing.tasks()[0].update(shape)
    assert "This run, with small models to 512 bytes, agrees." in answer.answers(agreeing, ENGLISH)[1].more
    without = made({"t5": {64: 1.7, 512: 2.7}, "rope": {64: 1.6, 512: 2.1}})
    without.tasks()[0].update(shape)
    far = answer.answers(without, ENGLISH)[1]
    assert (
        far.bold.startswith(f"Past it: {best}.")
        and f"{best} is not part of this run." in far.more
        and "none holds" in far.more
    )


def test_models_that_learned_little_are_named():
    here = answer.answers(made({"a": {64: 5.1, 256: 5.1}, "b": {64: 5.12, 256: 5.2}}), ENGLISH)[0]
    assert here.more.startswith("These models have learned little: the frequencies of bytes alone give about 3.")


def test_the_terminal_gets_the_answer_last_and_wrapped(run_folder):
    run = results.read(run_folder)
    for language, title in (("en", "\nAnswer\n"), ("zh", "\n结论\n")):
        text = report.as_text(run, Words(language), width=60)
        ending = text[text.index(title) :]
        assert len(ending.splitlines()) > 8 and max(map(report.columns, ending.splitlines())) <= 60
        assert ending.replace("\n", "").replace(" ", "") == (
            report.as_text(run, Words(language))[text.index(title) :].replace("\n", "").replace(" ", "")
        )
        assert not any(line.strip().startswith(("，", "。", "）")) for line in ending.splitlines())
    marked = report.as_text(run, bold=lambda line: f"<{line}>")
    assert "\n<  At the training length" in marked


def test_an_unfinished_run_says_so():
    run = made({"a": {64: 1.0, 256: 2.0}})
    run.wanted = 3
    assert answer.answers(run, ENGLISH)[0].bold == "Provisional: 1 of 3 trials are finished."
    assert len(answer.answers(run, ENGLISH)) == 4
    empty = made({"a": {}})
    empty.tasks()[0]["test"] = [64, 128]
    empty.finished = 0
    assert answer.answers(empty, ENGLISH)[1].bold == "Nothing was measured yet." and report.as_html(empty)


# ---- the reading test ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["quick", "paper"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_first_sixty_words_name_an_encoding_a_length_and_a_result(name, language, tmp_path):
    """Words as a browser would show them; of Chinese text, each character counts as one."""
    run = results.read(DOCS / name)
    report.save(run, tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    body = re.search(rf'<main class="lab {language}".*?</main>', page, re.DOTALL)[0]
    text = html.unescape(re.sub(r"<[^>]+>", " ", body))
    read = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+", text)[:60]
    names = {name for word in read for name in re.split(r"[，、。（）,;()\s]|: ", word.rstrip(":,."))}
    saved = json.loads((tmp_path / "results.json").read_text())
    assert names & {row["encoding"] for row in saved["rows"]}
    numbers = set(re.findall(r"\d+(?:\.\d+)?", " ".join(read).replace(",", "")))
    assert numbers & {str(row["size"]) for row in saved["rows"]}
    task = run.tasks()[0]
    known = [run.point(task, e, s, "loss") for e in run.encodings(task) for s in task["test"]]
    assert numbers & {f"{point.value:.3f}" for point in known if isinstance(point, Mean)}


def test_commands_refuse_invalid_arguments():
    with pytest.raises(LabError, match="the presets are"):
        cli.compare(["--preset", "quik"])
    with pytest.raises(LabError, match="--steps 0"):
        cli.compare(["--steps", "0"])
    with pytest.raises(LabError, match="it has previous, text"):
        cli.compare(["--preset", "smoke", "--tasks", "sort"])
    with pytest.raises(LabError, match="goes with two runs"):
        cli.show_report(["x", "--out", "y"])


def test_encodings_are_chosen_by_name(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'alibi'"):
        cli.compare(["--preset", "smoke", "--out", str(tmp_path), "--encodings", "rope", "alibbi"])
