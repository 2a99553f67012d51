"""Show the jobs of the runs here: their state, the node-hours they took and the steps they did.

polarlm jobs              all runs
polarlm jobs demo         one
"""

import argparse
from pathlib import Path

from polarlm.cli.runs import folder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN`."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run's folder, or its name (default: all)")


def run(arguments: argparse.Namespace) -> None:
    """Print a table, and a line for each run."""
    from polarlm.config import UserError
    from polarlm.launch import job_table

    if arguments.run is not None:
        folders = [folder_of(arguments.run)]
        if not (folders[0] / "jobs.jsonl").exists():
            raise UserError(f"{folders[0]}: no jobs.jsonl there, so no job was submitted for it: see `polarlm submit`")
    else:
        folders = [path.parent for path in sorted(Path("runs").glob("*/jobs.jsonl")) if not path.parent.is_symlink()]
        if not folders:
            raise UserError("runs: no run here has a job yet: see `polarlm submit`")
    print("\n".join(job_table(folders)))
