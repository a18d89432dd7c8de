"""Files from disk: any content is used as documented or refused with a one-line error; pages escape all text."""

import copy
import json
from html.parser import HTMLParser

import pytest

from posenc.cli.main import main
from posenc.lab import compare_runs, presets, report, results
from posenc.lab.errors import LabError
from posenc.lab.results import Results

ODD = (None, True, "x", "", -1, 0, 10**30, 1e308, float("nan"), float("inf"), [], [[]], {}, {"a": 1}, "\ud800")
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)></pre></svg></style>&amp;\u2028\u2029\x1b[2J"
TAGS = {
    "html", "head", "meta", "title", "style", "script", "body", "h1", "h2", "h3", "p", "div", "table", "tr", "th", "td",
    "pre", "svg", "g", "path", "rect", "text", "input", "nav", "label", "main", "ul", "li", "strong", "span", "details",
    "summary", "wbr",
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(run_folder):
    """results.json with two rows and one training a task."""
    content = json.loads((run_folder / "results.json").read_text())
    names = [task["task"] for task in content["experiment"]["tasks"]]
    content["rows"] = [next(r for r in content["rows"] if r["task"] == n and r["size"] == s)
                       for n, s in zip((names[0], names[0], names[1], names[1]), (6, 12, 16, 32))]  # fmt: skip
    content["trainings"] = [next(t for t in content["trainings"] if t["settings"]["task"] == n) for n in names]
    for training in content["trainings"]:
        training["curve"] = training["curve"][:2]
    content["experiment"]["published"] = ["alibi"]
    content["rows"][0]["error"] = "cannot run"
    return content


def leaves(value, path=()):
    """The path of every value, tables and lists included."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from leaves(part, (*path, key))


def get(content, path):
    for key in path:
        content = content[key]
    return content


def changed(content, path, value):
    made = copy.deepcopy(content)
    get(made, path[:-1])[path[-1]] = value
    return made


def refusal(make, *arguments):
    """The message of a refusal, or None; anything but an OptionError fails the test."""
    try:
        make(*arguments)
    except presets.OptionError as error:
        return str(error)
    return None


def rendered(found):
    return report.as_html(found, still=True), report.as_text(found), found.as_csv(), found.as_json()


STRIDES = [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


def some(content, stride):
    """Every path with each odd value, or with some of them: path n gets values n, n + stride, .. ."""
    return [(keys, value) for n, keys in enumerate(leaves(content)) for value in ODD[n % stride :: stride]]


@pytest.mark.parametrize("stride", STRIDES)
def test_every_value_of_results_json_may_be_odd(saved, tmp_path, stride):
    """Each is replaced by odd values: the page is written, or the file is refused with a message."""
    path = tmp_path / "results.json"
    refused = 0
    tried = some(saved, stride)
    for keys, value in tried:
        path.write_text(json.dumps(changed(saved, keys, value)))
        message = refusal(lambda: rendered(results.read(tmp_path)))
        refused += message is not None
        assert message is None or (str(path) in message and "\n" not in message)
    assert refused > 0.6 * len(tried)
    path.write_text(json.dumps(saved))
    assert all(rendered(results.read(tmp_path)))


@pytest.mark.parametrize("stride", STRIDES)
def test_every_value_of_settings_json_may_be_odd(run_folder, tmp_path, stride):
    settings = json.loads((run_folder / "settings.json").read_text())
    (tmp_path / "trials").mkdir()
    path = tmp_path / "settings.json"
    for keys, value in some(settings, stride):
        path.write_text(json.dumps(changed(settings, keys, value)))
        message = refusal(lambda: rendered(results.read(tmp_path)))
        assert message is None or "\n" not in message


BROKEN = {
    "empty": b"", "cut": b'{"experiment": {', "list": b"[]", "number": b"3", "bytes": b"\xff\xfe\x00",
    "deep": b'{"experiment":' * 50_000, "deep list": b"[" * 200_000, "nan": b'{"wanted": NaN}',
    "digits": b'{"wanted": ' + b"9" * 10_000 + b"}", "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("name", ["settings.json", "results.json"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_the_command_refuses_a_damaged_file(run_folder, tmp_path, capsys, name, content):
    if name == "settings.json":
        (tmp_path / "trials").mkdir()
    (tmp_path / name).write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and name in message and "Traceback" not in message


def test_a_damaged_settings_file_is_written_again_by_the_same_command(tiny, run_copy, text, capsys):
    before = (run_copy / "results.csv").read_bytes()
    (run_copy / "settings.json").write_bytes(b"{")
    with pytest.raises(LabError, match=r"settings\.json cannot be used"):
        results.read(run_copy)
    from posenc.lab.run import compare

    compare(tiny(seeds=2, rates=[2.0]), run_copy, text=text, jobs=1)
    assert (run_copy / "results.csv").read_bytes() == before


def test_a_file_that_is_a_folder_or_cannot_be_found(tmp_path, capsys):
    (tmp_path / "a.toml").mkdir()
    for arguments in (["report", str(tmp_path)], ["report", "\0"], ["compare", "--preset", str(tmp_path / "a.toml")],
                      ["compare", "--preset", str(tmp_path / "none.toml")], ["compare", "--preset", "a\0b"],
                      ["compare", "--preset", "../presets/quick"], ["compare", "--preset", ""]):  # fmt: skip
        assert main(arguments) == 2, arguments
        assert capsys.readouterr().err.count("\n") == 1


# ---- presets ------------------------------------------------------------------------------------------------------
PRESET = {
    "title": "t", "device": "cpu", "published": ["alibi"], "encodings": ["none", "rope+ntk:8"], "seeds": 1, "batch": 4, "width": 16,
    "heads": 2, "layers": 1, "steps": 2, "count": 16, "rates": [2.0], "lr": 1e-3, "threads": 1, "weight_decay": 0.0,
    "tasks": [{"task": "text", "train": 16, "test": [16], "sliding": 8, "windows": 4}, {"task": "copy:unique=true", "train": 4, "test": [4]}],
}  # fmt: skip


def test_every_value_of_a_preset_may_be_odd():
    def make(content):
        made = presets.from_dict(content, "x")
        made.check()
        assert 0 < len(made.trials()) < presets.MAX_TRIALS

    make(PRESET)
    message = [refusal(make, changed(PRESET, keys, value)) for keys in leaves(PRESET) for value in ODD]
    assert sum(sentence is not None for sentence in message) > 200


ODD_PRESETS = {
    "not toml": "=", "deep": "a = " + "[" * 100_000, "tasks of numbers": "tasks = [1, 2]", "tasks table": "[tasks]\ntask = 'text'",
    "nan": "lr = nan\n[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['none']",
    "true is no number": "[[tasks]]\ntask='text'\ntrain=true\ntest=[4]\nsteps=1\nencodings=['none']",
    "no sizes": "[[tasks]]\ntask='text'\ntrain=4\ntest=[]\nsteps=1\nencodings=['none']",
    "date": "title = 1979-05-27\n[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['none']",
    "width": "width=10\nheads=4\n[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['none']",
    "published": "published=['nobody']\n[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['none']",
    "too many": "seeds=1000\n[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=[" + "'none'," * 900 + "]",
    "task option": "[[tasks]]\ntask='flipflop:noise=3'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['none']",
    "task value": "[[tasks]]\ntask='copy:symbols=many'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['none']",
    "encoding value": "[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['t5:buckets=many']",
    "odd encoding": "[[tasks]]\ntask='text'\ntrain=4\ntest=[4]\nsteps=1\nencodings=['rope+ntk:x,y']",
}  # fmt: skip


@pytest.mark.parametrize("content", ODD_PRESETS.values(), ids=ODD_PRESETS)
def test_odd_presets_are_refused(tmp_path, capsys, content):
    path = tmp_path / "odd.toml"
    path.write_text(content)
    assert main(["compare", "--preset", str(path), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("posenc: ") and message.count("\n") == 1 and not (tmp_path / "out").exists()


# ---- escaping -----------------------------------------------------------------------------------------------------
class Reader(HTMLParser):
    """Fails if the page has an element or an attribute that the lab does not write."""

    def __init__(self):
        super().__init__()
        self.texts, self.scripts = [], 0

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        self.scripts += tag == "script"
        for name, _ in attributes:
            assert not name.startswith("on") and name not in ("src", "href"), (tag, name)

    def handle_data(self, data):
        self.texts.append(data)


def read_page(page, scripts):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.scripts == scripts
    assert "<script>alert" not in page and "<img" not in page
    return "".join(reader.texts)


def strings(content):
    return [path for path in leaves(content) if isinstance(get(content, path), str)]


def pages(run):
    """Every page, without a script and with the one that chooses the language."""
    names = [HOSTILE, HOSTILE]
    for still, scripts in ((True, 0), (False, 1)):
        for page in (report.as_html(run, still=still), compare_runs.as_html(run, run, names, still=still)):
            yield page, read_page(page, scripts)


def test_a_hostile_string_in_any_field_is_escaped(saved, tmp_path):
    """Read from the file: a field refuses it, or it arrives as text."""
    path = tmp_path / "results.json"
    arrived = 0
    for keys in strings(saved):
        path.write_text(json.dumps(changed(saved, keys, HOSTILE)))
        try:
            run = results.read(tmp_path)
        except LabError:
            continue
        arrived += 1
        for page, _ in pages(run):
            assert HOSTILE not in page
        assert "\x1b" not in report.as_text(run) + compare_runs.as_text(run, run, ["a", "b"])
    assert arrived > 20


def test_hostile_strings_everywhere_at_once(saved):
    """Without the validation of the file: pages escape every string."""
    evil = copy.deepcopy(saved)
    for keys in strings(evil):
        if keys[-1] not in ("task", "published") and keys[:2] != ("experiment", "published"):
            get(evil, keys[:-1])[keys[-1]] = HOSTILE
    evil["experiment"]["tasks"][1]["sliding"] = HOSTILE
    for number, training in enumerate(evil["trainings"]):
        training["settings"]["task"] = saved["trainings"][number]["settings"]["task"]
    texts = [text for _, text in pages(Results(**evil))]
    assert HOSTILE in texts[0] and f"last {HOSTILE} bytes" in texts[0]  # it is there, as text
    assert texts[0].count("<script>alert(1)</script>") > 10


def test_published_results_can_be_read():
    """The files in docs, of an earlier version."""
    for name in ("quick", "paper"):
        found = results.read(f"docs/results/{name}")
        assert found.finished == len(found.trainings) <= found.wanted
        assert all(found.encodings(task) == list(task["encodings"]) for task in found.tasks())
