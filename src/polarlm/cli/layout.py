"""Show how a run will lie over its ranks, before it runs: a table, and a picture.

polarlm layout run.yaml --ranks 16
polarlm layout run.yaml --ranks 512 --parallel.tensor 8 --parallel.pipeline 4 --png mesh.png
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.cli.beginning import run_file

if TYPE_CHECKING:
    from polarlm.config import RunConfig

TAKES_CONFIG_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run file, the ranks and the picture; a run's fields are taken as flags without being declared."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run file, or a run's folder")
    parser.add_argument("--ranks", metavar="N", help="short for --parallel.ranks N")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it, too")


def run(arguments: argparse.Namespace) -> None:
    """Print the table."""
    from polarlm.config import UserError, load_run
    from polarlm.launch import Request, available_spread
    from polarlm.report import describe_layout, draw_layout

    file, _ = run_file(arguments.run)
    flags = [*arguments.config_flags, *(["--parallel.ranks", arguments.ranks] if arguments.ranks else [])]
    available = available_spread(Request(), os.environ)
    loaded = load_run(file, environment=os.environ, flags=flags, devices=available.world, nodes=len(available.hosts))
    config = _with_vocabulary(loaded.config)
    if arguments.png and not arguments.png.resolve().parent.is_dir():
        raise UserError(f"--png: there is no folder {arguments.png.parent}; make it, or name another")
    print(describe_layout(config))
    if arguments.png:
        draw_layout(config, arguments.png)
        print(f"drawn: {arguments.png}")


def _with_vocabulary(config: "RunConfig") -> "RunConfig":
    """Stages are balanced by the size of the head, which the tokenizer may have to tell."""
    if config.parallel.pipeline == 1 or config.model.vocab_size is not None:
        return config
    from polarlm.config import with_tokenizer
    from polarlm.data import load_tokenizer, tokenizer_of

    tokenizer = config.data.tokenizer or tokenizer_of(config.data)
    return with_tokenizer(config, tokenizer, load_tokenizer(tokenizer).vocab_size)
