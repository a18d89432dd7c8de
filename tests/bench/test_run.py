"""A wrong contender is not timed; one that would not fit or take too long is skipped with a reason; the others are
measured."""

import pytest
import torch

from posenc.bench import libraries, peers, run, workloads
from posenc.bench.workloads import WORKLOADS, Problem, make_case


class Wrong(peers.Ours):
    name = "wrong"

    def make(self, problem):
        right = super().make(problem)
        return lambda q, k, v: right(q, k, v) * 1.01


class WrongTable(peers.Ours):
    """Correct except for the gradient of the encoding's parameters."""

    name = "wrong table"

    def make(self, problem):
        def attention(q, k, v):
            plan = problem.plan()
            (lookup,) = plan.lookups
            bias = lookup.bias.detach() + 0.5 * (lookup.bias - lookup.bias.detach())
            changed = type(lookup)(lookup.index, bias=bias)
            return peers.attend(q, k, v, type(plan)(plan.positions, lookups=(changed,), scale=plan.scale))

        return attention


class Missing(peers.Ours):
    name = "missing"
    version = libraries.Library.version


class Broken(peers.Ours):
    name = "broken"

    def make(self, problem):
        raise RuntimeError("has no kernel\nfor this")


class Tiring(peers.Ours):
    """Correct, until memory is used up by what others keep."""

    name = "tiring"

    def make(self, problem):
        right, calls = super().make(problem), []

        def attention(q, k, v):
            calls.append(1)
            if problem.case.length == 64 and len(calls) > 3:
                raise torch.OutOfMemoryError("tried to allocate 4 GiB")
            return right(q, k, v)

        return attention


class GPU(peers.Ours):
    name = "gpu"
    devices = ("cuda",)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(run, "CHECKED", 40)
    for peer in (Wrong(), WrongTable(), Missing(), Broken(), Tiring(), GPU()):
        monkeypatch.setitem(run.PEERS, peer.name, peer)


def test_a_wrong_result_is_reported_and_not_timed(small):
    others = ["wrong", "wrong table", "missing", "broken", "gpu"]
    result = run.run(["t5"], [32], ["posenc", *others], repeats=2)
    notes = {(r["peer"], r["pass"]): r["note"] for r in result["records"] if "note" in r}
    timed = {(r["peer"], r["pass"]): r for r in result["records"] if "seconds" in r}
    assert notes["wrong", "forward"] == "wrong: output is off by 1.0%"
    assert notes["wrong table", "training"] == "wrong: gradient of table is off by 50.0%"
    assert notes["missing", "forward"] == "not installed"
    assert notes["broken", "training"] == "fails: RuntimeError: has no kernel"
    assert notes["gpu", "forward"] == "runs on cuda only"
    passes = ("forward", "training")
    assert set(timed) == {(p, kind) for p in ("plain", "posenc") for kind in passes} | {("wrong table", "forward")}
    for kind in passes:
        assert timed["posenc", kind]["seconds"] > 0
        assert timed["posenc", kind]["engine"] == "cpu"
        assert timed["plain", kind]["ratio"] == 1.0
    assert result["machine"]["torch"] == torch.__version__


def test_a_contender_that_would_not_fit_is_skipped(small, monkeypatch):
    made = []

    class Watched(peers.DenseBias):
        def make(self, problem):
            made.append(problem.case.length)
            return super().make(problem)

    monkeypatch.setitem(run.PEERS, "dense bias", Watched())
    monkeypatch.setattr(run, "free_bytes", lambda device: 2_000_000)
    result = run.run(["t5"], [32, 4096], ["dense bias"], repeats=2, train=False, patience=1e9)
    notes = {(r["peer"], r["length"]): r["note"] for r in result["records"] if "note" in r}
    assert notes["dense bias", 4096].startswith("would need about 2 GiB, by its")
    assert made == [40, 32]
    assert notes["plain", 4096].startswith("would need about")  # then there is no base for ratios


def test_a_contender_that_fails_later_costs_itself_only(small):
    result = run.run(["t5"], [32, 64], ["posenc", "tiring", "dense bias"], repeats=3)
    for kind in ("forward", "training"):
        records = {(r["peer"], r["length"]): r for r in result["records"] if r["pass"] == kind}
        assert records["tiring", 64]["note"] == "ran out of memory"
        timed = {key for key, record in records.items() if "seconds" in record}
        assert timed == {(name, n) for name in ("plain", "posenc", "tiring", "dense bias") for n in (32, 64)} - {
            ("tiring", 64)
        }


def test_patience_extrapolates_from_the_previous_length(small):
    result = run.run(["t5"], [64, 128], ["posenc"], repeats=2, train=False, patience=1e-7)
    notes = [r["note"] for r in result["records"] if r["peer"] == "plain"]
    assert all(note.startswith("would take about") for note in notes) and len(notes) == 2


def test_progress_and_intermediate_results(small):
    heard, kept = [], []
    names = ["t5", "alibi"]
    keep = lambda result: kept.append({r["workload"] for r in result["records"]})  # noqa: E731
    run.run(names, [32], ["posenc"], repeats=2, tick=lambda text, done: heard.append(done), keep=keep)
    assert heard == sorted(heard) and heard[0] == 0.0 and heard[-1] == 1.0
    assert kept == [{"t5"}, {"t5", "alibi"}]


def test_tables_that_a_peer_keeps_count_as_its_memory():
    peer = run.PEERS["x-transformers"]
    if peer.version() is None:
        pytest.skip("x-transformers is not installed")
    problem = Problem(make_case(WORKLOADS["alibi"], 64, "cpu", torch.float32))
    attention = peer.make(problem)
    attention(problem.q, problem.k, problem.v)
    assert peer.kept(attention) >= 8 * 64 * 64 * 4


def test_a_disturbed_measurement_is_repeated(small, monkeypatch):
    shares = iter([0.5, 0.2])

    class Noisy:
        def share(self):
            return next(shares)

    monkeypatch.setattr(run, "OtherProcesses", Noisy)
    result = run.run(["t5"], [32], ["posenc"], repeats=2, train=False)
    assert {r["busy"] for r in result["records"]} == {0.2}


def test_gradients_near_zero_are_compared_with_the_typical_one():
    big, none = torch.ones(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    names = ["output", "q", "k", "v", "table", "bias"]
    exact = [big, big, big, big, big, none]
    assert run.find_error(names, [*exact[:5], none + 1e-5], exact, 2e-4) is None
    assert run.find_error(names, [*exact[:5], none + 1e-3], exact, 2e-4) == "bias is off by 0.1%"
    assert run.find_error(names, [*exact[:4], big * float("nan"), none], exact, 2e-4) == "table is not finite"


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_contenders_are_correct(name, monkeypatch):
    """Every peer that is installed and needs neither a compiler nor a GPU, forward and all gradients."""
    workload = WORKLOADS[name]
    problem = Problem(make_case(workload, 150, "cpu", torch.float32))
    kinds = ["forward"] + (["training"] if workload.queries is None else [])
    truth = run.reference(problem, "training" in kinds)
    right = []
    for peer in run.PEERS.values():
        if "cpu" in peer.devices and peer.version() is not None and not isinstance(peer, peers.Flex):
            state = run.check(peer, problem, truth, kinds)
            bad = {kind: note for kind, note in state.notes.items() if note.startswith(("wrong", "fails"))}
            assert not bad, peer.name
            right += [peer.name] * (not state.notes)
    assert right[:2] == ["plain", "posenc"]
    if workload.encoding in peers.BIASES:
        assert "dense bias" in right


@pytest.mark.parametrize("name", ["t5-causal", "shaw", "deberta", "transformer_xl", "alibi"])
def test_flex_attentions_score_function(name):
    """The score function itself, vectorised, without the compiler: the same scores as the reference."""
    from posenc import scores

    problem = Problem(make_case(WORKLOADS[name], 70, "cpu", torch.float32))
    plan = problem.plan()
    q = problem.q if plan.shift is None else problem.q + plan.shift[:, None]
    scale = plan.scale or q.shape[3] ** -0.5
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (1, 8, 70, 70)), indexing="ij")
    for copies in (1, 8):
        score = peers.score_function(plan, q, problem.k, copies)
        found = score(q @ problem.k.transpose(-1, -2) * scale, b, h, i, j)
        torch.testing.assert_close(found, scores(problem.q, problem.k, plan), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_flex_attention_compiles_here(small):
    import shutil

    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    problem = Problem(make_case(WORKLOADS["t5"], 40, "cpu", torch.float32))
    state = run.check(run.PEERS["flex attention"], problem, run.reference(problem, True), ["forward", "training"])
    assert state.notes == {"training": "FlexAttention has no backward pass on a CPU"}
    assert state.last["forward"][0] == 40


def test_kernels_are_imported_without_their_package(tmp_path, monkeypatch):
    package = tmp_path / "half_broken"
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('an old transformers')")
    (package / "ops" / "__init__.py").write_text("")
    (package / "ops" / "kernel.py").write_text("ANSWER = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert libraries._kernels("half_broken", "ops.kernel").ANSWER == 42


def test_the_sets_and_the_gpu_shapes():
    for names in workloads.SETS.values():
        assert set(names) <= set(WORKLOADS)
    shapes = [make_case(WORKLOADS["t5"], length, "cuda", torch.bfloat16).shape for length in workloads.LENGTHS["cuda"]]
    assert shapes == ["B4 H16 L4096 D64", "B1 H16 L16384 D64"]
    assert make_case(WORKLOADS["relative_logits"], 4096, "cuda", torch.bfloat16).shape == "B4 H16 L4096 D128"


@pytest.mark.gpu
def test_on_a_gpu():
    result = run.run(["t5", "shaw"], [256], ["posenc", "dense bias"], device="cuda", dtype=torch.bfloat16, repeats=2)
    timed = {(r["workload"], r["peer"], r["pass"]): r for r in result["records"] if "seconds" in r}
    assert timed["t5", "posenc", "training"]["engine"] == "triton"
    assert timed["t5", "cudnn", "forward"]["launched"] > 0
    assert "driver" in result["machine"]
