"""Draw the loss of a run into its report folder, and print what the run did."""

import argparse

from polarlm.cli.runs import add_run_argument, folder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN`."""
    add_run_argument(parser)


def run(arguments: argparse.Namespace) -> None:
    """Draw and print."""
    from polarlm.report import draw_loss, summary

    folder = folder_of(arguments.run)
    print(summary(folder))
    print(f"\ndrawn: {draw_loss(folder)}")
