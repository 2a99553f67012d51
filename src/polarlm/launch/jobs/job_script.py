"""The script of a job: what it asks of its scheduler, what its user had, and the run it trains.

Nothing is hidden in it, and it fetches nothing.
"""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from polarlm.launch.jobs.activation import module_lines, python_lines, variable_lines
from polarlm.launch.jobs.schedulers import BatchScheduler, Wanted
from polarlm.launch.machines.sites import Site

__all__ = ["job_script"]

_HEAD = """began=$(date +%s)
fail() { echo "error: $1 on $HOSTNAME" >&2; exit 2; }"""


def job_script(
    wanted: Wanted,
    scheduler: BatchScheduler,
    site: Site | None,
    environment: Mapping[str, str],
    *,
    run_folder: Path,
    work_folder: Path,
    submitted_by: Iterable[str],
    in_config: Iterable[str],
    chain: str | None,
) -> str:
    """The whole script.

    Args:
        environment: of who submits; its modules, Python and variables come back in the job.
        run_folder: as seen from `work_folder`, from where paths in the run's configuration count.
        submitted_by: the command line, to be read in the script.
        in_config: variables that the configuration has taken in.
        chain: None, `chain` for one of several jobs, `until-done` for one that submits the next.
    """
    folder = shlex.quote(str(run_folder))
    chained = {
        None: "",
        "chain": " --chain",
        "until-done": f" --until-done {shlex.quote(str(run_folder / 'job.sh'))}",
    }[chain]
    said = shlex.join(submitted_by).replace("\n", " ")
    parts = [
        ["#!/bin/bash", *scheduler.directives(wanted), f"# Written by: {said}"],
        [_HEAD, f'cd {shlex.quote(str(work_folder))} || fail "this job\'s folder is not there"'],
        module_lines(environment, site),
        python_lines(environment),
        variable_lines(environment, in_config),
        [
            "# Trains on every node; tells the run to save before the walltime ends, and keeps jobs.jsonl.",
            f'exec "$python" -m polarlm.launch.job {folder} --scheduler {scheduler.name} --nodes {wanted.nodes} \\',
            f'    --walltime-s {wanted.walltime_s} --began "$began"{chained} -- \\',
            f'    "$python" -m polarlm train {folder} --resume --nodes {wanted.nodes}',
        ],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"
