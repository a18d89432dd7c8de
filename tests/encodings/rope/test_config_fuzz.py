"""Random configurations: each is read, or refused with one sentence, soon. Never a TypeError, a hang or a large table.

POSENC_SEED (an integer) draws other ones.
"""

import json
import math
import os
import random
import signal
import time
from contextlib import contextmanager

import pytest

from posenc import MRoPE, OptionError, scaling
from posenc import rope as rotary
from posenc.cli import main as cli
from posenc.cli import rope_diff
from posenc.core.checks import show_value
from posenc.encodings.rope.configs import DIALECTS, KEYS, read
from posenc.encodings.rope.fields import FIELDS, field
from posenc.encodings.rope.gguf import SCALING
from posenc.encodings.rope.model_defaults import BASES, BY_LAYER, INTERLEAVED, LAYERED

SEED = int(os.environ.get("POSENC_SEED", "0"))
HUGE = 10**400


def deep():
    made: list = []
    for _ in range(100_000):
        made = [made]
    return made


DEEP = deep()
ODD = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 128, 4096, 10**12, -(10**12), 2**63, HUGE, -HUGE, 0.0, -0.0, 0.5, 1.0, 2.5,
    1e-300, 1e308, math.nan, math.inf, -math.inf, "", "8", "yarn", "x" * 10_000, "\0", "默认", [], [1.0], [1.0] * 32,
    [math.nan] * 32, [0] * 64, [16, 24, 24], ["1"], [[1.0]], [HUGE], {}, {"factor": 2.0}, {"rope_type": {}}, DEEP,
    {"deep": DEEP}, (1.0, 2.0), b"bytes", {1: 2}, {None: 1}, object(),
]  # fmt: skip
VALID = {
    "head_dim": [64, 128], "hidden_size": [4096], "num_attention_heads": [32, 64], "max_position_embeddings": [4096, 131072],
    "original_max_position_embeddings": [4096, 8192], "rope_theta": [10000.0, 5e5], "factor": [1.0, 4.0, 8],
    "low_freq_factor": [1.0], "high_freq_factor": [4.0], "beta_fast": [32], "beta_slow": [1], "truncate": [True, False],
    "short_factor": [[1.0] * 32, [1.0] * 64], "long_factor": [[2.0] * 32, [2.0] * 64], "partial_rotary_factor": [0.5, 1.0],
    "mscale": [1.0, 0.707], "mscale_all_dim": [1.0], "attention_factor": [1.2], "mrope_section": [[16, 24, 24]],
    "alpha": [2.0], "mixed_b": [0.6], "attn_factor": [1.0, 1.1], "apply_yarn_scaling": [True, False], "short_mscale": [1.1],
    "long_mscale": [1.2],
}  # fmt: skip
KINDS = sorted({kind for kinds in KEYS.values() for kind in kinds} | {"su", "mrope", "axial", "magic"})
MODELS = sorted({*INTERLEAVED, *BASES, *LAYERED, *BY_LAYER, "llama", "bert", "deepseek_v3", "ernie4_5_vl_moe"})
LAYERS = [None, None, None, "full_attention", "sliding_attention", "", 3, ["full_attention"]]
ROPE = sorted(
    {key for kinds in KEYS.values() for some in kinds.values() for key in some} | {"rope_theta", "mrope_section"}
)
MODEL = sorted(set(FIELDS) - set(ROPE) - {"layer_type", "length"} - {key for key in FIELDS if "." in key})
GGUF = sorted(key for key in FIELDS if "." in key or key in ("context_length", "embedding_length"))


@contextmanager
def limit(seconds):
    """Fail where this takes longer: a hang is a failure, not a suite that never ends."""

    def stop(*_):
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def value(draw, key):
    return draw.choice(VALID[key]) if key in VALID and draw.random() < draw.valid else draw.choice(ODD)


def rotation(draw, dialect):
    kinds = KEYS.get(dialect, KEYS["hf"])
    kind = draw.choice(sorted(kinds)) if draw.random() < draw.valid else draw.choice(KINDS)
    asked = sorted(kinds.get(kind, ROPE))
    keys = set(asked) if draw.random() < 0.5 else set(draw.sample(asked, k=draw.randint(0, len(asked))))
    if draw.random() > draw.valid:
        keys |= set(draw.sample(ROPE, k=2))
    made = {key: value(draw, key) for key in sorted(keys)}
    return {**made, draw.choice(["rope_type", "type"]): kind if draw.random() < draw.valid else draw.choice(ODD)}


def configuration(draw, dialect="hf"):
    """Mostly valid, half valid, or hardly: where nothing is valid only the first check is reached."""
    draw.valid = draw.choice([1.0, 0.97, 0.9, 0.5])
    rope = rotation(draw, dialect) if draw.random() < draw.valid else draw.choice(ODD)
    if draw.random() < 0.1:
        rope = {"full_attention": rope, "sliding_attention": draw.choice([rope, None, *ODD])}
    if draw.random() < 0.1 and isinstance(rope, dict):
        return rope
    keys = sorted(MODEL) if draw.random() > draw.valid else ["head_dim", "hidden_size", "num_attention_heads"]
    made = {key: value(draw, key) for key in draw.sample(keys, k=draw.randint(0, len(keys) // 2))}
    made[draw.choice(["rope_parameters", "rope_scaling"])] = rope
    if draw.random() < 0.7:
        made["model_type"] = draw.choice(MODELS) if draw.random() < draw.valid else draw.choice(ODD)
    if draw.random() < 0.8:
        made |= {"head_dim": value(draw, "head_dim"), "max_position_embeddings": value(draw, "max_position_embeddings")}
    return {"text_config": made} if draw.random() < 0.1 else made


def gguf_value(draw, key):
    if draw.random() > draw.valid:
        return draw.choice(ODD)
    if key.endswith(("length", "count")):
        return 64 if "context" not in key else 4096
    return [1.0] * 32 if key.endswith("weight") else 10000.0 if "base" in key else 1.0


def metadata(draw):
    draw.valid = draw.choice([1.0, 0.97, 0.9, 0.5])
    kind = draw.choice(sorted(SCALING)) if draw.random() < draw.valid else draw.choice(["magic", *ODD])
    asked = sorted(f"rope.scaling.{key}" for key in SCALING.get(kind, ())) if isinstance(kind, str) else []
    asked += ["rope.freq_base", "rope.dimension_count", "context_length", "attention.key_length"]
    keys = set(draw.sample(asked, k=draw.randint(len(asked) // 2, len(asked))))
    keys |= set() if draw.random() < draw.valid else set(draw.sample(GGUF, k=3))
    made = {key: gguf_value(draw, key) for key in sorted(keys)} | {"rope.scaling.type": kind}
    if kind == "longrope" and draw.random() < draw.valid:
        made |= {"rope_factors_long.weight": [2.0] * 32, "rope_factors_short.weight": [1.0] * 32}
    prefix = draw.choice(["", "", "llama.", "deepseek2."])
    return {prefix + key if key.startswith("rope.") else key: each for key, each in made.items()}


def judged(function, *given, **options):
    """1 where it returns, 0 where it refuses in one sentence; anything else is raised."""
    made, sentence = None, ""
    try:
        with limit(5):
            made = function(*given, **options)
    except ValueError as error:  # of which OptionError is one
        sentence = str(error)
    if made is None:
        assert 10 < len(sentence) < 1000 and "\n" not in sentence, sentence
        return 0
    frequencies = made.frequencies(8192)
    assert len(frequencies) <= 2**16 and all(map(math.isfinite, frequencies))
    return 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_random_configuration_is_read_or_refused(dialect):
    draw = random.Random(f"{SEED} {dialect}")
    began, read_ones = time.perf_counter(), 0
    for number in range(2000):
        config = metadata(draw) if dialect == "llama.cpp" else configuration(draw, dialect)
        options = {"layer_type": draw.choice(LAYERS), "length": draw.choice([None, None, 4096, *ODD])}
        options = {} if draw.random() < 0.8 else options
        head = {} if draw.random() < 0.9 else {"head_dim": draw.choice([64, *ODD]), "layout": "half"}
        if dialect == "llama.cpp":
            head.setdefault("layout", "half")
        try:
            read_ones += judged(rotary.from_config, config, dialect, **options, **head)
            judged_scaling(config, dialect, options)
            if number % 4 == 0:
                judged(MRoPE.from_config, config, dialect)
        except Exception as error:
            raise AssertionError(f"draw {number} of seed {SEED}: {show_value(config)}") from error
    assert 150 < read_ones < 1900  # neither everything nor nothing
    assert time.perf_counter() - began < 60


def judged_scaling(config, dialect, options):
    try:
        made = scaling.from_config(config, dialect, **options)
    except OptionError:
        return
    if made is not None:
        assert math.isfinite(made.magnitude) and math.isfinite(made.score_factor)


@pytest.mark.parametrize("config", [3, None, "x", [], {1: 2}, {"text_config": {"text_config": DEEP}}, object()])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(OptionError):
        rotary.from_config(config)


@pytest.mark.parametrize(("config", "words"), [
    ({"head_dim": 10**12}, "head_dim=1000000000000 must be a whole number from 1 to 65536"),
    ({"hidden_size": 10**9, "num_attention_heads": 1}, "head_dim"),
    ({"hidden_size": 8, "num_attention_heads": 16}, "no room for 16 heads"),
    ({"head_dim": 64, "rope_theta": math.inf}, "rope_theta=inf must be a number"),
    ({"head_dim": 64, "rope_theta": math.nan}, "rope_theta=nan must be a number"),
    ({"head_dim": 64, "rope_theta": True}, "rope_theta=True"),
    ({"head_dim": 64, "rope_theta": HUGE}, "a whole number of 1329 bits"),
    ({"head_dim": "64", "rope_theta": 1e4}, "head_dim='64'"),
    ({"head_dim": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": "false"}, "max_position_embeddings": 64},
     "truncate='false' must be true or false"),
    ({"head_dim": 64, "rope_parameters": {"rope_type": ["yarn"]}}, "rope_type"),
    ({"head_dim": 64, "rope_scaling": 3}, "rope_scaling=3 must be a table of keys and values"),
    ({"rope_parameters": {"a": DEEP}, "rope_scaling": {"a": deep()}}, "nested deeper"),
    ({"head_dim": 64, "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 10**6, "long_factor": [1.0]}},
     "must be a list of 1 to 32768 values, has 1000000"),
    ({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12}, "'bert'. has no rotation"),
])  # fmt: skip
def test_the_sentence_says_what_was_given_and_what_is_allowed(config, words):
    with pytest.raises(OptionError, match=words):
        rotary.from_config(config)


def test_null_is_absent_and_every_field_has_a_check():
    assert field({"head_dim": None}, "head_dim", 7) == 7
    assert read({"head_dim": 64, "rope_theta": None, "rope_scaling": None}).rotary_dim == 64
    for name, check in FIELDS.items():
        with pytest.raises(OptionError, match=name.replace(".", r"\.")):
            check(name, object())


def test_a_head_of_a_trillion_channels_takes_no_memory_as_an_argument():
    with limit(5), pytest.raises(OptionError, match="head_dim"):
        rotary.from_config({"rope_theta": 1e4}, head_dim=10**12)


# ---- the command line ------------------------------------------------------------------------------------------------
GOOD = {"head_dim": 64, "rope_theta": 10000.0}
TEXTS = {
    "empty": b"", "no object": b"[1, 2]", "a number": b"3", "null": b"null", "not UTF-8": b"\xff\xfe{}", "no rotation": b'{"head_dim": 64}',
    "BERT": json.dumps({"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12}).encode(),
    "NaN": b'{"head_dim": 64, "rope_theta": NaN}', "Infinity": b'{"head_dim": 64, "rope_theta": Infinity}',
    "1e400": b'{"head_dim": 64, "rope_theta": 1e400}', "a long number": b'{"head_dim": 64, "rope_theta": ' + b"9" * 5000 + b"}",
    "a large head": b'{"head_dim": 1000000000000, "rope_theta": 1e4}', "an odd head": b'{"head_dim": 63, "rope_theta": 1e4}',
    "deep": b"[" * 200_000, "deep rope": b'{"head_dim": 64, "rope_scaling": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "truncated": json.dumps(GOOD).encode()[:-4], "null bytes": b"\0" * 100,
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_rope_diff_refuses_in_one_sentence(name, tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(GOOD))
    bad.write_bytes(TEXTS[name])
    for pair in ((good, bad), (bad, bad)):
        with limit(20):
            assert cli.main(["rope-diff", *map(str, pair)]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith("posenc: rope-diff: ") and printed.err.count("\n") == 1
        assert "bad.json" in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize(
    "more", [["--length", "0"], ["--length", "9" * 30], ["--head-dim", "-2"], ["--head-dim", "1000000000000"]]
)
def test_rope_diff_refuses_numbers_out_of_range(more, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text('{"rope_theta": 10000.0}')
    with limit(20):
        assert cli.main(["rope-diff", str(path), str(path), *more]) == 2
    assert more[0].strip("-").replace("-", "_").split("_")[0] in capsys.readouterr().err


def test_rope_diff_reads_no_endless_file(capsys):
    with limit(20):
        assert cli.main(["rope-diff", "/dev/zero", "/dev/zero"]) == 2
    assert "16 MB" in capsys.readouterr().err


def test_random_files_give_a_comparison_or_a_sentence(tmp_path, capsys):
    """What JSON can hold, through the command: 0 the same, 1 different, 2 and one sentence."""
    draw, statuses = random.Random(f"{SEED} files"), set()
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for _ in range(300):
        for path in paths:
            config = configuration(draw) if draw.random() < 0.8 else GOOD
            try:
                path.write_text(json.dumps(config, default=str))
            except (TypeError, ValueError, RecursionError):  # not JSON: a key that is no text, a long number
                path.write_text(json.dumps(GOOD))
        with limit(20):
            status = cli.main(["rope-diff", *map(str, paths), "--dialect", draw.choice(DIALECTS)])
        printed = capsys.readouterr()
        assert (status == 2) == bool(printed.err) and printed.err.count("\n") <= 1 and "nan" not in printed.out
        statuses.add(status)
    assert statuses == {0, 1, 2}


def test_numbers_that_are_not_equal_are_never_the_same():
    setup = read(GOOD)
    a = rope_diff.ConfiguredRotation("a", setup, (1.0, math.nan), 1.0)
    assert len(rope_diff.compare(a, a, 10)[1]) == 1
