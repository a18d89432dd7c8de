"""The command line in its own process, on a terminal and through a pipe."""

import os
import pty
import subprocess
import sys

import pytest

from posenc.cli import main as cli
from posenc.encodings.registry import ENCODINGS


def posenc(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "posenc", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100", **environment},
        timeout=300,
    )


def on_a_terminal(*arguments, **environment):
    """The output when it goes to a terminal."""
    main, terminal = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100", **environment}
    with subprocess.Popen([sys.executable, "-m", "posenc", *arguments], stdout=terminal, env=env) as process:
        os.close(terminal)
        text = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # Linux raises EIO when the other end has closed
                break
            if not part:
                break
            text += part
        process.wait(300)
    os.close(main)
    return text.decode()


@pytest.mark.parametrize(
    "arguments", [["--help"], [], ["list"], ["show", "t5"], ["show", "rope"], ["show", "T5"], ["--version"]]
)
def test_these_commands_do_not_import_torch(arguments):
    code = (
        "import sys; from posenc.cli.main import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'rich', 'typer', 'matplotlib', 'transformers', 'triton'} & set(sys.modules); "
        "assert not heavy, heavy; sys.exit(status)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_has_every_command_and_list_every_encoding():
    usage, table = posenc("--help").stdout, posenc("list").stdout
    for name, command in cli.COMMANDS.items():
        assert name in usage
        assert command.help.split()[0] in usage
    for name in ENCODINGS:
        assert f"\n{name} " in table


def test_colours_are_used_on_a_terminal_only_and_can_be_disabled():
    assert "\033" not in posenc("list").stdout
    assert "\033[1m" in on_a_terminal("list")
    assert "\033" not in on_a_terminal("list", NO_COLOR="1")
    assert "\033" not in on_a_terminal("list", TERM="dumb")


@pytest.mark.parametrize("wide", [30, 45, 60, 80, 200])
def test_the_table_fits_the_terminal(wide):
    assert max(map(len, posenc("list", COLUMNS=str(wide)).stdout.splitlines()[:-1])) <= wide


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lsit"], "unknown command 'lsit' (did you mean 'list'?); the commands are list, show"),
        (["show", "alibbi"], "unknown encoding 'alibbi' (did you mean 'alibi'?)"),
        (["show", "ALiBBi"], "unknown encoding 'ALiBBi' (did you mean 'alibi'?)"),
        (["plot", "T55"], "unknown encoding 'T55' (did you mean 't5'?)"),
        (["show", "t5:bucket=3"], "t5 has no option bucket"),
        (["show", "t5:buckets"], "is not OPTION=VALUE"),
        (["show", "t5:buckets=seven"], "cannot draw t5"),
        (["show", "t5", "alibi"], "one encoding at a time"),
        (["show"], "show needs an encoding"),
        (["list", "t5"], "takes no arguments"),
    ],
)
def test_invalid_arguments_get_one_sentence_and_status_2(arguments, sentence):
    done = posenc(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["compare", "--encodings", "alibii"], "unknown encoding 'alibii' (did you mean 'alibi'?)"),
        (["compare", "--encodings", "rope+yran:8"], "unknown extension 'yran' in rope+yran:8 (did you mean 'yarn'?)"),
        (["compare", "--throughput", "--encodings", "ropee"], "unknown encoding 'ropee' (did you mean 'rope'?)"),
        (["compare", "--preset", "quik"], "unknown preset 'quik' (did you mean 'quick'?)"),
        (["report", "nowhere"], "nowhere is not the folder of a run"),
        (["report", "/", "/", "--out", "both.pdf"], "its name must end in .html"),
        (["plot", "t5", "-o", "t5.jpg"], "cannot write 't5.jpg': its name must end in .png, .svg, .pdf"),
        (["rope-diff", "a.json", "b.json", "-o", "difference.jpg"], "cannot write 'difference.jpg'"),
        (["show", "rope+yran:8"], "unknown extension 'yran' in rope+yran:8 (did you mean 'yarn'?)"),
        (["show", "t5+yarn:8"], "they apply to rope only"),
        (["show", "rope+ntk"], "for example rope+ntk:8"),
    ],
)
def test_names_and_formats_are_checked_before_any_work(arguments, sentence, capsys, monkeypatch):
    """In this process: nothing is imported for it, which the next test checks for the commands that work."""
    monkeypatch.setattr(cli.sys, "modules", {k: v for k, v in sys.modules.items() if k != "torch"})
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert "torch" not in cli.sys.modules


FIRST = """
import sys
class Watch:
    def __init__(self, stream): self.stream = stream
    def write(self, text):
        if text.strip():
            assert "torch" not in sys.modules, "torch was loaded before the first line"
            self.stream.write("first: " + text); self.stream.flush()
            import os; os._exit(7)
    def __getattr__(self, name): return getattr(self.stream, name)
sys.stdout, sys.stderr = Watch(sys.stdout), Watch(sys.stderr)
from posenc.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "arguments", [["compare", "--lang", "zh"], ["report", "docs/results/quick"], ["plot", "t5"], ["claims"]]
)
def test_the_first_line_is_printed_before_torch_is_loaded(arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", FIRST, *arguments], capture_output=True, env=env, timeout=300)
    assert done.returncode == 7, done.stderr
    assert b"first: posenc " + arguments[0].encode() in done.stdout + done.stderr


def test_an_ascii_terminal_gets_question_marks():
    done = posenc("show", "t5", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "?" in done.stdout


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m posenc show t5 | true; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("command", ["list", "show t5"])
def test_a_full_disk_gets_one_sentence(command):
    line = f"{sys.executable} -m posenc {command} > /dev/full"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("posenc: cannot write the output: No space left on device; free some space")


def test_a_closed_output_is_not_an_error():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for closed in (">&-", ">&- 2>&-"):
        line = f"{sys.executable} -m posenc list {closed}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=env, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "paint", cli.Command("paint:main", "paints", "explorer"))
    for missing, words in ((["gradio"], "gradio, which is"), (["gradio", "plotly"], "gradio, plotly, which are")):
        monkeypatch.setattr(cli, "find_spec", lambda name, missing=missing: None if name in missing else "here")
        assert cli.main(["paint"]) == 2
        sentence = f"posenc: posenc paint needs {words} not installed: pip install 'posenc[explorer]'\n"
        assert capsys.readouterr().err == sentence


def test_missing_torch_is_named_and_other_missing_modules_raise(monkeypatch, capsys):
    def load(name):
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(cli.importlib, "import_module", load)
    missing = "torch"
    assert cli.main(["list"]) == 2
    assert "needs PyTorch, which is not installed: pip install torch" in capsys.readouterr().err
    missing = "posenc.cli.show"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["list"])


def test_the_extras_are_those_of_the_package():
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, modules in cli.EXTRAS.items():
        assert sorted(line.split(">=")[0] for line in declared[extra]) == sorted(modules)


def test_every_command_names_an_existing_function_and_extra():
    """Commands are imported by name when they are called, so a wrong name would otherwise fail only then."""
    import ast
    import tomllib
    from pathlib import Path

    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name, command in cli.COMMANDS.items():
        module, function = command.target.split(":")
        path = root / "src" / "posenc" / module.replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        defined = {node.name for node in ast.parse(source.read_text(encoding="utf-8")).body if hasattr(node, "name")}
        assert function in defined, f"posenc {name}: {command.target} does not exist"
        assert command.extra is None or command.extra in extras
