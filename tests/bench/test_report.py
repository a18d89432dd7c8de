"""Results are written, merged and printed."""

import json
import subprocess
import sys

import pytest

from docs.site.speed_tables import markdown
from posenc.bench import cli, growth, report, run


def record(workload="t5", peer="posenc", length=512, kind="forward", **more):
    shape = {"batch": 1, "heads": 8, "size": 64}
    return {"workload": workload, "peer": peer, "length": length, "pass": kind, **shape, **more}


def measured(power, memory, **names):
    return [
        record(length=n, seconds=3e-9 * n**power, ratio=1.2, spread=0.01, busy=0.0, bytes=1000 + memory(n), **names)
        for n in (512, 1024, 4096)
    ]


RESULT = {
    "machine": {"cpu": "some", "threads": 2, "torch": "2"},
    "versions": {"plain": "2", "posenc": "0.1", "dense bias": "2", "other": "1.0"},
    "when": "now", "device": "cpu", "dtype": "float32", "ceilings": ["plain"],
    "records": [
        *measured(2, lambda n: 0, peer="plain"),
        *measured(2, lambda n: 100 * n, peer="posenc"),
        *measured(2.5, lambda n: 32 * n * n, peer="dense bias"),
        record(peer="other", length=4096, note="would need about 30 GiB"),
        record(peer="other", length=None, kind="training", note="not installed"),
    ],
}  # fmt: skip


def test_growth():
    lines = {line["peer"]: line for line in growth.growth(RESULT)}
    assert (lines["plain"]["time"], lines["plain"]["extra_memory"]) == (2.0, None)
    assert (lines["posenc"]["time"], lines["posenc"]["extra_memory"]) == (2.0, 1.0)
    assert (lines["dense bias"]["time"], lines["dense bias"]["extra_memory"]) == (2.5, 2.0)
    assert (lines["posenc"]["from"], lines["posenc"]["to"]) == (512, 4096)
    assert growth.exponent([(512, 1.0), (1024, 2.0)]) is None


def test_the_table_is_complete(capsys):
    report.print_table(RESULT)
    out = capsys.readouterr().out
    assert "dense bias" in out and "1.20 ×" in out and "512 MiB, 100.0%" in out
    assert "not timed: other, t5 forward at 4096: would need about 30 GiB" in out
    assert "not timed: other, t5 training: not installed" in out
    assert "L^2.50" in out and "warning" not in out
    busy = [{**r, "busy": 0.4} if "busy" in r else r for r in RESULT["records"]]
    report.print_table({**RESULT, "records": busy})
    assert "other processes used up to 40% of this machine's cores during 9 of 9" in capsys.readouterr().out


def test_merging_keeps_the_same_machines_results():
    new = {**RESULT, "records": [record(length=512, seconds=1.0), record("alibi", length=512, seconds=1.0)]}
    both = report.merged(RESULT, new)["records"]
    assert len(both) == len(RESULT["records"]) + 1
    assert [r["seconds"] for r in both if growth.key(r) == ("t5", "posenc", 512, "forward")] == [1.0]
    newly = {**RESULT, "records": [record(peer="other", length=512, kind="training", seconds=1.0)]}
    assert not [r for r in report.merged(RESULT, newly)["records"] if r.get("note") == "not installed"]
    assert report.merged({**RESULT, "machine": {}}, new) is new


def test_markdown():
    table = markdown(RESULT, 4096)
    assert "| t5 | 1.20 × | – | 0 MiB (0.1%) | 1.20 × (dense bias) | – |" in table
    assert "some, 2 threads" in table
    assert markdown(RESULT, 4096, {"plan": "方案"}).startswith("| 方案 | forward |")


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "CHECKED", 40)
    arguments = ["--encodings", "t5", "--lengths", "24", "--peers", "posenc", "--repeats", "2", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert cli.main([*arguments[:1], "alibi", *arguments[2:]]) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert {r["workload"] for r in result["records"]} == {"t5", "alibi"}  # the same machine: results are kept
    assert (tmp_path / "results.png").stat().st_size > 1000
    assert "of plain" in capsys.readouterr().out
    assert "| t5 |" in markdown(result, 24)
    assert cli.main(["--list"]) == 0
    assert "measured on cuda" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--encodings", "t6"], "there are t5"),
        (["--peers", "nobody"], "there are plain"),
        (["--repeats", "1"], "--repeats at least 2"),
    ],
)
def test_mistakes_are_reported(arguments, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom posenc.cli.main import main\n"
        "try: main(['bench', '--help'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
