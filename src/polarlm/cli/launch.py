"""Run any program as the ranks of this machine, or of every node of the job this stands in.

polarlm launch -- python my_training.py            a rank for each device of each node
polarlm launch --dry-run -- python my_training.py  show what would be run, what it sets, and why; run nothing
polarlm launch --hosts a,b --ranks-per-node 2 -- CMD

The program finds torchrun's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. The first rank's output
comes here, the others' and all errors go to logs/<host>.<rank>.log.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

_LOGS = Path("logs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where and how, and the program."""
    parser.add_argument("--dry-run", action="store_true", help="show everything, and run nothing")
    parser.add_argument("--nodes", type=int, metavar="N", help="the first N hosts; by default all")
    parser.add_argument("--ranks-per-node", type=int, metavar="R", help="by default one for each device")
    parser.add_argument("--ranks", type=int, metavar="N", help="in all; spread evenly, or refused")
    parser.add_argument("--devices-per-node", "--gpus-per-node", type=int, metavar="D", help="instead of what is found")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, `name` or `name slots=4` a line")
    parser.add_argument("--hosts", metavar="A,B", help="hosts, `a,b` or `a:4,b:4`")
    parser.add_argument(
        "--launcher", choices=("local", "pals", "mpich", "openmpi", "srun", "torchrun"), help="by default as it fits"
    )
    parser.add_argument("--cpu-bind", metavar="B", help="how ranks are bound to cores, in the launcher's own words")
    parser.add_argument("--site", metavar="NAME", help="a machine of `polarlm sites`; by default recognised")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="what each rank runs")


def run(arguments: argparse.Namespace) -> int:
    """Show it, or run it to its end; the code is that of the rank that failed first."""
    from polarlm.config import UserError
    from polarlm.launch import Request, describe, prepare
    from polarlm.launch import run as run_launch

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise UserError("what is each rank to run? `polarlm launch [options] -- CMD ...`")
    if not arguments.dry_run and shutil.which(program[0]) is None:
        raise UserError(f"{program[0]}: there is no such program on the PATH")
    request = Request(
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        ranks=arguments.ranks,
        devices_per_node=arguments.devices_per_node,
        launcher=arguments.launcher,
        cpu_bind=arguments.cpu_bind,
        site=arguments.site,
        hosts=arguments.hosts,
        host_file=arguments.hostfile,
    )
    launch = prepare(program, request, os.environ, _LOGS.resolve(), is_dry=arguments.dry_run)
    if arguments.dry_run:
        print(describe(launch))
        return 0
    for warning in launch.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return run_launch(launch, _LOGS.resolve(), os.environ)
