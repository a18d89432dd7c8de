"""posenc rope-diff: differences as numbers, and none for equal rotations."""

import json
import subprocess
import sys

import pytest

from posenc.cli import main as cli
from posenc.cli import rope_diff

PLAIN = {"head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 10000.0}
LINEAR = {**PLAIN, "rope_scaling": {"type": "linear", "factor": 4.0}}
YARN = {**PLAIN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}
DYNAMIC = {**PLAIN, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}


@pytest.fixture
def files(tmp_path):
    def write(**configs):
        for name, config in configs.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(config))
        return [str(tmp_path / f"{name}.json") for name in configs]

    return write


def test_equal_rotations_under_different_names_are_equal(files, capsys):
    other = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    assert cli.main(["rope-diff", *files(a=PLAIN, b=other)]) == 0
    assert "The 32 frequencies and all factors are equal" in capsys.readouterr().out


def test_reports_the_frequencies_factors_and_phases_that_differ(files, capsys):
    assert cli.main(["rope-diff", *files(a=PLAIN, b=YARN), "--length", "8192"]) == 1
    out = capsys.readouterr().out
    assert "factor of cos and sin" in out
    assert "1.13862944" in out
    a, b = (rope_diff.read_rotation(config, "x", "hf", 8192) for config in (PLAIN, YARN))
    facts, pairs = rope_diff.compare(a, b, 8192)
    assert f"{len(pairs)} of 32 pairs" in out
    last = pairs[-1]
    assert last.pair == 31
    assert last.b == pytest.approx(last.a / 4)
    assert last.phase == pytest.approx(-0.75 * last.a * 8191)
    assert abs((last.a - last.b) * last.diverges_at) >= 0.1 > abs((last.a - last.b) * (last.diverges_at - 1))
    assert set(facts) == {"factor of cos and sin", "factor of scores"}


def test_one_file_in_two_dialects(files, capsys):
    (path,) = files(a=DYNAMIC)
    assert cli.main(["rope-diff", path, path, "--length", "2048"]) == 0
    assert cli.main(["rope-diff", path, path, "--length", "2048", "--dialect-b", "vllm"]) == 1
    assert "depends on length" in capsys.readouterr().out


def test_writes_a_figure(files, tmp_path, capsys):
    picture = tmp_path / "diff.svg"
    assert cli.main(["rope-diff", *files(a=PLAIN, b=LINEAR), "-o", str(picture)]) == 1
    assert picture.read_text().lstrip().startswith("<?xml")
    assert str(picture) in capsys.readouterr().out


@pytest.mark.parametrize(("config", "words"), [
    ({**PLAIN, "rope_scaling": {"type": "linear", "factr": 4.0}}, "did you mean 'factor'"),
    ({"rope_theta": 1e4, "rope_type": "default"}, "--head-dim"),
])  # fmt: skip
def test_an_invalid_configuration_gives_one_sentence(files, capsys, config, words):
    assert cli.main(["rope-diff", *files(a=PLAIN, b=config)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_missing_and_invalid_files(files, tmp_path, capsys):
    (good,) = files(a=PLAIN)
    assert cli.main(["rope-diff", good, str(tmp_path / "no.json")]) == 2
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert cli.main(["rope-diff", good, str(broken)]) == 2
    errors = capsys.readouterr().err
    assert "does not exist" in errors
    assert "is not JSON" in errors


def test_needs_no_torch(files):
    a, b = files(a=PLAIN, b=LINEAR)
    code = f"import sys; sys.modules['torch'] = None; from posenc.cli.main import main; sys.exit(main(['rope-diff', {a!r}, {b!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 1, done.stderr
    assert "32 of 32 pairs" in done.stdout


@pytest.mark.parametrize(
    ("config", "dialect", "words"),
    [
        ({"model_type": "gpt2", "n_embd": 768, "n_head": 12}, "hf", "('gpt2') has no rotation"),
        (
            {"model_type": "falcon", "alibi": True, "hidden_size": 64, "num_attention_heads": 4},
            "hf",
            "its model uses ALiBi",
        ),
        (
            {"model_type": "mpt", "d_model": 64, "n_heads": 4, "attn_config": {"alibi": True}},
            "hf",
            "('mpt') has no rotation",
        ),
        (
            {"model_type": "granitemoehybrid", "position_embedding_type": "nope", "rope_theta": 1e4},
            "vllm",
            "no positions",
        ),
        ({"general.architecture": "gpt2", "gpt2.embedding_length": 768}, "llama.cpp", "GGUF metadata has no rotation"),
    ],
)
def test_a_configuration_without_a_rotation_is_refused(config, dialect, words, tmp_path, capsys):
    from posenc.cli.main import main as posenc

    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert posenc(["rope-diff", str(path), str(path), "--dialect", dialect]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out == ""
