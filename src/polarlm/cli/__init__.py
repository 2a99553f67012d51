"""The command line: a table of commands, one short module each.

A command's module has `add_arguments(parser)` and `run(arguments) -> int | None`, and imports its room inside `run`.
With `TAKES_CONFIG_FLAGS = True`, flags it did not declare are fields of the run (`--train.seq-len 2048`): they arrive
untouched in `arguments.config_flags`. Only the module that is asked for is imported, so `polarlm --help` is instant.
"""

import argparse
import errno
import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

from polarlm import __version__

__all__ = ["COMMANDS", "main"]

# name: (module, what it does in one line)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("polarlm.cli.init", "write a commented run file to start from"),
    "models": ("polarlm.cli.models", "list the model presets and their sizes"),
    "tokenizer": ("polarlm.cli.tokenizer", "train a tokenizer on text"),
    "data": ("polarlm.cli.data", "turn text into token ids, and look at them"),
    "layout": ("polarlm.cli.layout", "show how a run will lie over its ranks"),
    "train": ("polarlm.cli.train", "train a model as a run file says, or go on with a run"),
    "submit": ("polarlm.cli.submit", "hand a run to PBS or Slurm, as one job or a chain of them"),
    "jobs": ("polarlm.cli.jobs", "show what became of the jobs of the runs here"),
    "logs": ("polarlm.cli.logs", "show or follow what the ranks of a run wrote"),
    "launch": ("polarlm.cli.launch", "run any program on every node of a job, or show how that would be done"),
    "sites": ("polarlm.cli.sites", "list the machines that are known, and what each wants"),
    "env": ("polarlm.cli.env", "make a Python environment on top of a site's own; copy it to every node of a job"),
    "doctor": ("polarlm.cli.doctor", "look for what is wrong with this machine, or with every node of a job"),
    "selftest": ("polarlm.cli.selftest", "train, save and resume a tiny model here, and say what works"),
    "verify": ("polarlm.cli.verify", "prove here that every layout computes what one process does"),
    "bench": ("polarlm.cli.bench", "measure speed and memory at any sequence length, and the longest that trains"),
    "generate": ("polarlm.cli.generate", "let a trained model write"),
    "checkpoint": ("polarlm.cli.checkpoint", "list, check and thin out a run's checkpoints; export weights"),
    "report": ("polarlm.cli.report", "draw and sum up what a run did"),
    "quickstart": ("polarlm.cli.quickstart", "from text to a model that writes, in a few minutes"),
}

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
# What a system says of a place that it lets nobody write or read, where a command has no better words for it.
_REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EIO, errno.ESTALE, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        _start_again_in_utf8()
    words, debug = _take_debug(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words, debug)
        sys.stdout.flush()  # here, where a broken pipe is caught
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`| head`); Python's own last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def _start_again_in_utf8() -> NoReturn:
    """Texts, names of files and what is printed are UTF-8 in any locale; Python decides on that as it starts."""
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "polarlm", *sys.argv[1:]])


def _dispatch(words: list[str], debug: bool) -> int:
    try:
        if not words or words[0].startswith("-"):
            _front_page().parse_args(words or ["--help"])
        if words[0] not in COMMANDS:
            return _unknown_command(words[0])
        return _run_command(words[0], words[1:], debug)
    except SystemExit as leaving:  # argparse leaves this way, after --help and after a wrong argument
        return leaving.code if isinstance(leaving.code, int) else 1


def _run_command(name: str, words: list[str], debug: bool) -> int:
    from polarlm.config import UserError  # brings the configuration's libraries, which `--help` does without

    module_path, help_line = COMMANDS[name]
    command = importlib.import_module(module_path)
    parser = _Parser(prog=f"polarlm {name}", description=command.__doc__ or help_line)
    command.add_arguments(parser)
    config_flags: list[str] = []
    if getattr(command, "TAKES_CONFIG_FLAGS", False):
        words, config_flags = parser.split_config_flags(words)
    arguments = parser.parse_args(words)
    arguments.config_flags = config_flags
    arguments.debug = debug
    try:
        return command.run(arguments) or 0
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        if debug or not _is_refusal(error):
            raise
        print(f"error: {_place(error)}: {error.strerror}; mend that, and try again", file=sys.stderr)
        return USER_ERROR


def _is_refusal(error: OSError) -> bool:
    is_nowhere = error.errno == errno.ENOENT and error.filename is None  # no folder for temporary files, tempfile says
    return error.errno in _REFUSALS or is_nowhere


def _place(error: OSError) -> str:
    """The file or folder where the system refused what was asked of it."""
    name = error.filename if error.filename is not None else "a file"
    return os.fsdecode(name) if isinstance(name, str | bytes) else str(name)


class _Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one line like every other, and that knows its own flags from a run's fields."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message} (see `{self.prog} --help`)\n")

    def split_config_flags(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Part this command's own words from the flags it did not declare, each with the values after it.

        Taken out before argparse sees them, for it would read `--seed 7 run.yaml` as the run file `7`. The values end
        at the next flag or at a run file's name, `*.yaml`, which no field takes.
        """
        own: list[str] = []
        config_flags: list[str] = []
        waiting = list(words)
        while waiting:
            word = waiting.pop(0)
            if word == "--":
                own += [word, *waiting]
                break
            if not word.startswith("--") or word.partition("=")[0] in self._option_string_actions:
                own.append(word)
                continue
            config_flags.append(word)
            while "=" not in word and waiting and not waiting[0].startswith("--") and not waiting[0].endswith(".yaml"):
                config_flags.append(waiting.pop(0))
        return own, config_flags


def _front_page() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items())
    parser = _Parser(
        prog="polarlm",
        usage="polarlm COMMAND [arguments]",
        description="From raw text to a trained language model that writes.",
        epilog=f"commands:\n{table}\n\n`polarlm COMMAND --help` says what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"polarlm {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a user's mistake too")
    return parser


def _take_debug(words: list[str]) -> tuple[list[str], bool]:
    """`--debug` is accepted anywhere on the line, so it is taken out before any parser looks."""
    end = words.index("--") if "--" in words else len(words)
    flags = [word for word in words[:end] if word != "--debug"]
    return flags + words[end:], len(flags) < end


def _unknown_command(name: str) -> int:
    from difflib import get_close_matches

    near = get_close_matches(name, COMMANDS, n=3, cutoff=0.5)
    mend = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(COMMANDS)}"
    print(f"error: no command {name!r}; {mend}", file=sys.stderr)
    return USER_ERROR
