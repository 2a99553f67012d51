"""Draw the loss of a run into its report folder, and print what the run did."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN`."""
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path("runs/latest"),
        metavar="RUN",
        help="a run's folder, or its name (default: runs/latest)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Draw and print."""
    from polarlm.report import draw_loss, summary

    by_name = Path("runs") / arguments.run
    folder = by_name if not arguments.run.exists() and by_name.exists() else arguments.run
    print(summary(folder))
    print(f"\ndrawn: {draw_loss(folder)}")
