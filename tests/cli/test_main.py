"""The frame of the command line: what it loads, what it hands over, and how it ends."""

import errno
import importlib.util
import os
import subprocess
import sys
import types

import pytest

from polarlm import __version__, cli
from polarlm.config import UserError


@pytest.fixture
def command(monkeypatch):
    """A command `probe` whose arguments and behaviour a test may set; returns its module."""
    module = types.ModuleType("probe_command", "Probe the frame.")
    module.add_arguments = lambda parser: parser.add_argument("file", nargs="?")
    module.run = lambda arguments: module.__dict__.update(seen=arguments)
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", ("probe_command", "probe the frame"))
    return module


def raising(error):
    def run(arguments):
        raise error

    return run


def test_help_lists_every_command_at_once_and_loads_none():
    code = (
        "import sys; from polarlm.cli import COMMANDS, main; main(['--help']);"
        "modules = ['torch', 'pydantic', 'numpy', *(path for path, _ in COMMANDS.values())];"
        "print([name for name in modules if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    for name, (_, help_line) in cli.COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert help_line in result.stdout


def test_help_answers_at_once():
    """In a fraction of what the configuration's libraries alone would take; a busy machine slows both alike."""
    shown, libraries = (_own_seconds(words) for words in (["-m", "polarlm", "--help"], ["-c", "import pydantic, yaml"]))
    assert 0 < shown < 0.7 * libraries


def _own_seconds(words):
    """Least time of its own that Python takes in five tries, so that what else the machine does counts little."""
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return min(seconds)


def test_every_command_of_the_table_has_its_module():
    for path, _ in cli.COMMANDS.values():
        assert importlib.util.find_spec(path), path


def test_no_words_show_the_commands(capsys):
    assert cli.main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"polarlm {__version__}\n"


def test_an_unknown_command_names_its_neighbours_in_one_line(capsys):
    assert cli.main(["trian", "run.yaml"]) == 2
    assert capsys.readouterr().err == "error: no command 'trian'; did you mean train?\n"


def test_a_wrong_argument_is_one_line(command, capsys):
    assert cli.main(["probe", "a", "--wat"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unrecognized arguments: --wat")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a/logs"), "a/logs: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), "a file: No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found"), "a file: No usable temporary"),
    ],
)
def test_a_place_that_lets_nobody_write_is_one_line(error, said, command, capsys):
    command.run = raising(error)
    assert cli.main(["probe"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}")
    assert told.count("\n") == 1
    with pytest.raises(OSError, match=error.strerror):
        cli.main(["--debug", "probe"])


def test_a_file_that_is_missing_for_no_known_reason_is_our_own_mistake(command):
    command.run = raising(FileNotFoundError(errno.ENOENT, "No such file", "ours.yaml"))
    with pytest.raises(FileNotFoundError):
        cli.main(["probe"])


def test_a_users_mistake_is_one_line_without_a_traceback(command, capsys):
    command.run = raising(UserError("train.steps: 0 is no number of steps; give 1 or more"))
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == "error: train.steps: 0 is no number of steps; give 1 or more\n"


@pytest.mark.parametrize("words", [["--debug", "probe", "x"], ["probe", "--debug", "x"], ["probe", "x", "--debug"]])
def test_debug_anywhere_shows_the_traceback(command, capsys, words):
    command.run = raising(UserError("no"))
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("error: no\n")


def test_a_defect_of_ours_keeps_its_traceback(command):
    command.run = raising(RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["probe"])


def test_what_a_command_returns_is_the_exit_code(command):
    assert cli.main(["probe"]) == 0
    command.run = lambda arguments: 7
    assert cli.main(["probe"]) == 7
    command.run = raising(KeyboardInterrupt())
    assert cli.main(["probe"]) == 130


@pytest.mark.parametrize(
    ("words", "file", "flags"),
    [
        (["run.yaml", "--train.seq-len", "2048"], "run.yaml", ["--train.seq-len", "2048"]),
        (["--train.seq-len", "2048", "run.yaml"], "run.yaml", ["--train.seq-len", "2048"]),
        (["--train.seq-len=2048", "run"], "run", ["--train.seq-len=2048"]),
        (["run.yaml", "--data.paths", "a", "b", "--seed", "7"], "run.yaml", ["--data.paths", "a", "b", "--seed", "7"]),
        (["--train.compile", "--own", "3", "run.yaml"], "run.yaml", ["--train.compile"]),
        (["run.yaml", "--schedule.min-lr", "-1"], "run.yaml", ["--schedule.min-lr", "-1"]),
        (["run.yaml", "--ow.n", "4"], "run.yaml", ["--ow.n", "4"]),
    ],
)
def test_flags_that_a_command_did_not_declare_are_fields_of_the_run(command, words, file, flags):
    def add_arguments(parser):
        parser.add_argument("file")
        parser.add_argument("--own")

    command.add_arguments = add_arguments
    command.TAKES_CONFIG_FLAGS = True
    assert cli.main(["probe", *words]) == 0
    assert command.seen.file == file
    assert command.seen.config_flags == flags


def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        command = [sys.executable, "-m", "polarlm", "--help"]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        result = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, env=buffered)
    assert result.stderr == ""
    assert result.returncode == 141
