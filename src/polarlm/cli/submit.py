"""Hand a run to PBS or Slurm: check it, write its job script into the run's folder, and submit that.

polarlm submit run.yaml --nodes 2 --walltime 01:00:00 --queue debug --account myproject
polarlm submit run.yaml --nodes 2 --walltime 06:00:00 --until-done --train.steps 100000
polarlm submit runs/demo --resume --walltime 01:00:00         go on with a run
polarlm submit run.yaml --nodes 2 --walltime 01:00:00 --dry-run   print the script; write and submit nothing
"""

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.cli.beginning import RUNS, check_weights, complete, fill_folder, find_run, make_folder, run_file

if TYPE_CHECKING:
    from polarlm.config import LoadedRun, RunConfig
    from polarlm.launch import BatchScheduler, Site

TAKES_CONFIG_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run and what its jobs ask for; a run's fields are taken as flags without being declared."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run file, or a run's folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run; start it if it has not begun")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="by default 1")
    parser.add_argument("--walltime", required=True, metavar="HH:MM:SS", help="of each job")
    parser.add_argument("--queue", metavar="Q", help="PBS queue, Slurm partition, or what the site calls a queue")
    parser.add_argument("--account", metavar="A", help="the project that pays")
    parser.add_argument("--filesystems", metavar="F", help="by default the site's")
    parser.add_argument(
        "--devices-per-node",
        "--gpus-per-node",
        type=int,
        metavar="D",
        help="ranks a node; by default the site's",
    )
    parser.add_argument("--site", metavar="NAME", help="a machine of `polarlm sites`; by default recognised")
    parser.add_argument("--scheduler", choices=("pbs", "slurm"), help="by default the site's, or the one that is here")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="WORDS",
        help="one more of the scheduler: --option=--gres=gpu:4",
    )
    chained = parser.add_mutually_exclusive_group()
    chained.add_argument("--chain", type=int, metavar="K", help="K jobs, each after the one before")
    chained.add_argument("--until-done", action="store_true", help="each job submits the next while steps remain")
    parser.add_argument("--dry-run", action="store_true", help="print the script; write and submit nothing")
    parser.epilog = "every field of a run is a flag too: see `polarlm train --help`"


def run(arguments: argparse.Namespace) -> None:
    """Check everything, then write and submit."""
    from polarlm.config import UserError
    from polarlm.launch import BATCH_SCHEDULERS, lock, recognise, run_folder, short_host_name, site_named

    site = site_named(arguments.site) if arguments.site is not None else recognise(short_host_name(), os.environ)
    scheduler = BATCH_SCHEDULERS[_scheduler_name(arguments, site)]
    walltime_s = _seconds(arguments.walltime)
    if arguments.chain is not None and arguments.chain < 1:
        raise UserError(f"--chain: {arguments.chain} jobs cannot be; give at least 1")
    file, given = run_file(arguments.run)
    loaded, per_node = _load(arguments, file, site)
    config = complete(loaded.config)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)

    folder = (given or find_run(config)) if arguments.resume else None
    if folder is None and config.train.init_from:
        check_weights(config)
    if folder and (folder / "stop").exists():
        raise UserError(f"{folder / 'stop'} would end the run at once: remove it, and submit again")
    planned = folder or run_folder.next_folder(RUNS, str(config.name))
    text = _script(arguments, planned, scheduler, site, walltime_s, per_node)  # checks what goes into it
    if arguments.dry_run:
        print(text, end="")
        return
    scheduler.check_program()
    is_new = folder is None
    folder = folder or make_folder(config)
    try:
        text = _script(arguments, folder, scheduler, site, walltime_s, per_node)
        with lock.hold(folder):
            fill_folder(folder, config, is_new, starts_now=False)
            (folder / "job.sh").write_text(text, encoding="utf-8")
        _submit(arguments, folder, scheduler, walltime_s, config)  # the job may begin at once, and needs the lock
    except UserError:
        if is_new and not (folder / "jobs.jsonl").exists():  # nothing is left of what was not submitted
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _load(arguments: argparse.Namespace, file: Path | None, site: "Site | None") -> "tuple[LoadedRun, int]":
    """(the run on all ranks of the job to come, ranks a node).

    Raises:
        UserError: a fault of the run; or the nodes do not come out even.
    """
    from polarlm.config import UserError, load_run

    if arguments.nodes < 1:
        raise UserError(f"--nodes: {arguments.nodes} nodes cannot be; give at least 1")
    if arguments.devices_per_node is not None and arguments.devices_per_node < 1:
        raise UserError(f"--devices-per-node: {arguments.devices_per_node} ranks a node cannot be; give at least 1")
    devices = arguments.devices_per_node or (site.devices_per_node if site else None)
    flags = arguments.config_flags
    if devices and file is not None and file.name == "config.yaml" and not _says_ranks(flags):
        flags = [*flags, "--parallel.ranks", str(arguments.nodes * devices)]  # the folder's were those of its last job
    loaded = load_run(
        file,
        environment=os.environ,
        flags=flags,
        devices=arguments.nodes * (devices or 1),
        nodes=arguments.nodes,
    )
    ranks = loaded.config.parallel.ranks
    assert ranks is not None
    if devices is None and not (_says_ranks(flags) or _file_says_ranks(file)):
        raise UserError(
            "--devices-per-node: nothing says how many devices a node of this machine has; "
            "give their number (or the ranks a node, where there are only CPUs), or --site"
        )
    if ranks % arguments.nodes or (devices and ranks // arguments.nodes > devices):
        most = f" of {devices} devices" if devices else ""
        raise UserError(
            f"parallel.ranks: {ranks} cannot be spread evenly over {arguments.nodes} nodes{most}; change it, or --nodes"
        )
    return loaded, ranks // arguments.nodes


def _says_ranks(flags: list[str]) -> bool:
    return any(flag.partition("=")[0] == "--parallel.ranks" for flag in flags)


def _file_says_ranks(file: Path | None) -> bool:
    from polarlm.config.sources import from_yaml

    return file is not None and "parallel.ranks" in from_yaml(file)


def _scheduler_name(arguments: argparse.Namespace, site: "Site | None") -> str:
    from polarlm.config import UserError
    from polarlm.launch import BATCH_SCHEDULERS

    if arguments.scheduler:
        return arguments.scheduler
    if site and site.scheduler in BATCH_SCHEDULERS:
        return site.scheduler
    if site and site.scheduler:
        raise UserError(f"--site: {site.name} has {site.scheduler}, and jobs are written for PBS and Slurm only")
    here = [name for name, scheduler in BATCH_SCHEDULERS.items() if shutil.which(scheduler.program)]
    if len(here) != 1:
        found = "both qsub and sbatch are" if here else "neither qsub nor sbatch is"
        raise UserError(f"--scheduler: {found} on the PATH; say pbs or slurm, or a machine with --site")
    return here[0]


def _seconds(text: str) -> int:
    from polarlm.config import UserError

    match = re.fullmatch(r"([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])", text)
    seconds = sum(int(part) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    if not seconds:
        raise UserError(f"--walltime: {text!r} is no time such as 01:30:00 (hours:minutes:seconds)")
    return seconds


def _script(
    arguments: argparse.Namespace,
    folder: Path,
    scheduler: "BatchScheduler",
    site: "Site | None",
    walltime_s: int,
    per_node: int,
) -> str:
    from polarlm.config.deck import VARIABLES
    from polarlm.launch import Wanted, job_script, lead_time

    wanted = Wanted(
        name=folder.name,
        nodes=arguments.nodes,
        ranks_per_node=per_node,
        walltime_s=walltime_s,
        logs=folder / "logs",
        warning_s=round(lead_time(folder, walltime_s)),
        queue=arguments.queue,
        account=arguments.account,
        filesystems=arguments.filesystems or (site.filesystems if site and site.scheduler == scheduler.name else None),
        options=(*(site.directives if site else ()), *arguments.option),
        is_known_site=site is not None,
    )
    return job_script(
        wanted,
        scheduler,
        site,
        os.environ,
        run_folder=folder,
        work_folder=Path.cwd(),
        submitted_by=["polarlm", *sys.argv[1:]],
        in_config=[name for name in VARIABLES if os.environ.get(name)],
        chain="until-done" if arguments.until_done else "chain" if arguments.chain else None,
    )


def _submit(
    arguments: argparse.Namespace, folder: Path, scheduler: "BatchScheduler", walltime_s: int, config: "RunConfig"
) -> None:
    """Submit the job, or the jobs of a chain, and write each down at once."""
    from polarlm.launch import write_job_event

    before = None
    for _ in range(arguments.chain or 1):
        at = time.time()
        job = scheduler.submit(folder / "job.sh", after=before)
        facts = {"scheduler": scheduler.name, "nodes": arguments.nodes, "walltime_s": walltime_s, "by": "user"}
        write_job_event(folder, "submitted", job, at, **facts, queue=arguments.queue)
        where = f"{arguments.nodes} node{'s' * (arguments.nodes > 1)}, {config.parallel.ranks} ranks"
        after = f", after {before}" if before else ""
        print(f"{folder}: job {job}, {where}, {arguments.walltime}{after}", flush=True)
        before = job
