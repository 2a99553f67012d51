"""From text to a model that writes, in a few minutes: every command it runs is printed, to be typed again by hand.

It takes this Python's own standard library as text, trains a tokenizer and a small model on it on two CPU ranks,
compares the model with gzip and xz, and lets it write.
"""

import argparse
import os
import shlex
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

_FOLDER = Path("data/quickstart")
_PROMPTS = ["    def test_read(self):\n", "import ", "class "]  # several, for a text may end at once


TAKES_CONFIG_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own; fields of the run are taken as flags, such as `--train.steps 50`."""


def run(arguments: argparse.Namespace) -> None:
    """Take a small model through its life."""
    from polarlm.config import load_run

    tokenizer, prefix = str(_FOLDER / "tokenizer"), str(_FOLDER / "stdlib")
    with as_file(files("polarlm.cli") / "quickstart.yaml") as run_file:
        load_run(
            run_file, environment=os.environ, flags=arguments.config_flags
        )  # a mistake shows before minutes of work
        _polarlm("tokenizer", "train", "stdlib", "--vocab-size", "4096", "--output", tokenizer)
        _polarlm("data", "prepare", "stdlib", "--tokenizer", tokenizer, "--output", prefix)
        _polarlm("train", str(run_file), "--data.paths", prefix, *arguments.config_flags)
    _compare(prefix)
    prompts = [word for prompt in _PROMPTS for word in ("--prompt", prompt)]
    _polarlm("generate", *prompts, "--max-tokens", "80", "--temperature", "0.8", "--top-k", "40", "--seed", "1")
    print("\nthe run is in runs/latest, its loss drawn in runs/latest/report/loss.png")


def _compare(prefix: str) -> None:
    """The model beside general compressors on the same text, which also get to see no more than it does at a time."""
    from polarlm.config import load_run_folder
    from polarlm.data import IndexedDataset
    from polarlm.report import read_metrics

    run = Path("runs/latest")
    config = load_run_folder(run)
    manifest = IndexedDataset(prefix).manifest
    window = round(config.train.seq_len * manifest["bytes"] / manifest["tokens"])
    split = ",".join(f"{share:g}" for share in config.data.split)
    _polarlm("data", "compress", prefix, "--split", split, "--window-bytes", str(window))
    bits = [line["val_bits_per_byte"] for line in read_metrics(run) if line.get("val_bits_per_byte")]
    if bits:
        print(f"the model, {config.train.seq_len} tokens at a time: {bits[-1]:.3f} bits per byte")


def _polarlm(*words: str) -> None:
    """Show a command and run it; where it fails, so do we."""
    print(f"\n$ polarlm {shlex.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "polarlm", *words]).returncode
    if code:
        raise SystemExit(code)
