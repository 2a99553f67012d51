"""From text to a model that writes, in a few minutes: every command it runs is printed, to be typed again by hand.

It takes this Python's own standard library as text, trains a tokenizer and a small model on it on two CPU ranks,
compares the model with gzip and xz, and lets it write.
"""

import argparse
import shlex
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

_FOLDER = Path("data/quickstart")
_PROMPT = "def read_lines(path):\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes fields of the run as flags, such as `--train.steps 50`."""


TAKES_CONFIG_FLAGS = True


def run(arguments: argparse.Namespace) -> int:
    """Run the whole life of a small model."""

    tokenizer, prefix = _FOLDER / "tokenizer", _FOLDER / "stdlib"
    with as_file(files("polarlm.cli") / "quickstart.yaml") as run_file:
        _polarlm("tokenizer", "train", "stdlib", "--vocab-size", "4096", "--output", str(tokenizer))
        _polarlm("data", "prepare", "stdlib", "--tokenizer", str(tokenizer), "--output", str(prefix))
        _polarlm("train", str(run_file), "--data.paths", str(prefix), *arguments.config_flags)
    _polarlm("data", "compress", str(prefix))
    _polarlm("generate", "--prompt", _PROMPT, "--max-tokens", "120", "--temperature", "0.7", "--seed", "1")
    return 0


def _polarlm(*words: str) -> None:
    """Show a command and run it; its failure is ours."""
    print(f"\n$ polarlm {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "polarlm", *words]).returncode
    if code:
        raise SystemExit(code)
