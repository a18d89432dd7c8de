"""The bench: a wrong contender is not timed, the rest is measured, results are kept and shown."""

import json
import subprocess
import sys

import pytest
import torch

from posenc.bench import cli, measure, peers, report
from posenc.bench import run as bench
from posenc.bench.workloads import WORKLOADS


class Wrong(peers.Ours):
    name = "wrong"

    def make(self, workload, scheme, length):
        right = super().make(workload, scheme, length)
        return lambda q, k, v: right(q, k, v) * 1.01


class Missing(peers.Ours):
    name = "missing"
    package = "no-such-package-anywhere"
    version = peers.Peer.version


def test_a_wrong_result_is_reported_and_not_timed(monkeypatch):
    for peer in (Wrong(), Missing()):
        monkeypatch.setitem(peers.PEERS, peer.name, peer)
    monkeypatch.setattr(bench, "CHECKED", 40)
    result = bench.run(["t5"], [32], ["posenc", "wrong", "missing"], repeats=1)
    by = {(r["peer"], r["pass"]): r for r in result["records"]}
    assert by["wrong", "forward"]["note"].startswith("wrong: output is off by")
    assert "seconds" not in by["wrong", "forward"]
    assert by["missing", "forward"]["note"] == "not installed"
    for kind in ("forward", "training"):
        assert by["posenc", kind]["seconds"] > 0
        assert by["plain", kind]["ratio"] == 1.0
    assert result["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("peer", ["plain", "posenc", "dense bias", "textbook"])
def test_contenders_are_right(name, peer, monkeypatch):
    monkeypatch.setattr(bench, "CHECKED", 150)
    contender, workload = peers.PEERS[peer], WORKLOADS[name]
    if contender.refuses(workload, 150) is None:
        assert bench.wrong(contender, workload, "cpu", torch.float32) is None


@pytest.mark.parametrize("name", ["t5", "t5-causal", "alibi", "deberta", "transformer_xl"])
@pytest.mark.parametrize("peer", ["x-transformers", "transformers"])
def test_other_libraries_are_right(name, peer, monkeypatch):
    contender, workload = peers.PEERS[peer], WORKLOADS[name]
    if contender.version() is None:
        pytest.skip(f"{peer} is not installed")
    monkeypatch.setattr(bench, "CHECKED", 150)
    if contender.refuses(workload, 150) is None:
        assert bench.wrong(contender, workload, "cpu", torch.float32) is None


def test_peak_bytes_counts_what_is_held_at_once():
    def call():
        a = torch.empty(1000, 1000)
        b = a + 1
        del a
        return b + 1

    assert 8_000_000 <= measure.peak_bytes(call) < 8_100_000


def test_exponent():
    records = [
        {"workload": "w", "peer": "p", "pass": "forward", "length": n, "seconds": 3e-9 * n**2}
        for n in (512, 1024, 4096)
    ]
    assert report.exponent(records, "w", "p", "forward") == pytest.approx(2.0)
    assert report.exponent(records[:2], "w", "p", "forward") is None


def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "CHECKED", 40)
    arguments = ["--schemes", "t5", "--lengths", "24", "--peers", "posenc", "--repeats", "1", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert cli.main([*arguments[:1], "alibi", *arguments[2:]]) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert {r["workload"] for r in result["records"]} == {"t5", "alibi"}  # the same machine: results are kept
    assert (tmp_path / "results.png").stat().st_size > 1000
    assert "of plain" in capsys.readouterr().out
    assert "| t5 |" in report.markdown(result, 24)
    with pytest.raises(SystemExit):
        cli.main(["--schemes", "t6"])
    assert "there are t5" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom posenc.cli import main\n"
        "try: main(['bench', '--help'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
