"""The argument RUN that several commands take: a run's folder, or its name, or nothing for the newest."""

import argparse
from pathlib import Path

_RUNS = Path("runs")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN`, as `arguments.run`."""
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=_RUNS / "latest",
        metavar="RUN",
        help="a run's folder, or its name (default: runs/latest)",
    )


def folder_of(run: Path) -> Path:
    """The folder that is meant: the path itself where it is there, else the run of that name, where it is."""
    by_name = _RUNS / run
    return by_name if not run.exists() and by_name.exists() else run
