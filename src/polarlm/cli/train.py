"""Train a model as a run file says, or go on with a run.

polarlm train run.yaml                             every field of the file is a flag too:
polarlm train run.yaml --train.steps 500 --parallel.ranks 2
polarlm train run.yaml --resume                    go on from the run's newest checkpoint
polarlm train runs/demo --resume                   the same, by the run's folder

In a job of PBS, Slurm or Cobalt the same command trains on every node (`polarlm launch --dry-run -- CMD` shows how).
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.cli.beginning import RUNS, check_weights, complete, fill_folder, find_run, make_folder, run_file

if TYPE_CHECKING:
    from polarlm.config import RunConfig
    from polarlm.launch import Request

TAKES_CONFIG_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run file and what is done with it; a run's fields are taken as flags without being declared."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run file, or a run's folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run; start it if it has not begun")
    parser.add_argument("--nodes", type=int, metavar="N", help="of the job; by default all, or as many as ranks need")
    parser.add_argument("--show-config", action="store_true", help="print the resolved run, and train nothing")
    parser.epilog = _describe_fields()


def run(arguments: argparse.Namespace) -> int:
    """Check everything, start the ranks, and at the end draw and sum up what they did."""
    from polarlm.config import dump_run, load_run
    from polarlm.launch import Request, available_spread, lock
    from polarlm.report import describe_layout

    _refuse_to_be_a_rank()
    file, given = run_file(arguments.run)
    available = available_spread(Request(nodes=arguments.nodes), os.environ)
    loaded = load_run(
        file,
        environment=os.environ,
        flags=arguments.config_flags,
        devices=available.world,
        nodes=len(available.hosts),
    )
    config = complete(loaded.config)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.show_config:
        print(dump_run(config), end="")
        return 0

    request = Request(nodes=arguments.nodes, ranks=config.parallel.ranks, ranks_name="parallel.ranks")
    _check_launch(request)
    folder = (given or find_run(config)) if arguments.resume else None
    if folder is None and config.train.init_from:
        check_weights(config)
    is_new = folder is None
    folder = folder or make_folder(config)
    if is_new and folder.name != config.name:
        print(f"note: {RUNS / config.name} is there already, so this new run is {folder}", file=sys.stderr)
    with lock.hold(folder):
        fill_folder(folder, config, is_new)
        print(f"{folder}: {_introduce(config)}", flush=True)
        if config.parallel.ranks > 1:
            print(describe_layout(config), flush=True)
        code = _train(folder, request)
    if code == 0:
        _conclude(folder)
    return code


def _refuse_to_be_a_rank() -> None:
    """One of several processes of someone else's launcher would start every rank once more."""
    from polarlm.config import UserError
    from polarlm.launch import rank_from

    place = rank_from(os.environ)
    if place and (place.world > 1 or os.environ.get("RANK")):
        raise UserError(
            f"RANK: another launcher has started this process, as rank {place.rank} of {place.world}, but PolarLM "
            "starts its own ranks, on every node of a job: run `polarlm train` without a launcher, or unset RANK"
        )


def _check_launch(request: "Request") -> None:
    """Find out before anything is made whether these ranks can be started."""
    from polarlm.launch import check_environment, prepare

    launch = prepare([], request, os.environ, Path())
    if launch.kind == "local":
        check_environment(os.environ)
    for warning in launch.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _train(folder: Path, request: "Request") -> int:
    """The ranks of this machine, or of the job's nodes."""
    from polarlm.launch import prepare, run_local
    from polarlm.launch import run as run_launch

    command = [sys.executable, "-m", "polarlm.cli.rank", str(folder)]
    logs = (folder / "logs").resolve()
    launch = prepare(command, request, os.environ, logs)
    if launch.kind == "local":
        return run_local(command, launch.spread.world, folder / "logs", os.environ)
    print(f"on {', '.join(host.name for host in launch.spread.hosts)}: {dict(launch.reasons)['launcher']}", flush=True)
    return run_launch(launch, logs, os.environ)


def _introduce(config: "RunConfig") -> str:
    from polarlm.plan import count_parameters

    train, ranks = config.train, config.parallel.ranks
    return (
        f"{count_parameters(config.model):,} parameters, {train.steps} steps of {train.global_batch_size} x "
        f"{train.seq_len} tokens, on {ranks} rank{'s' * (ranks > 1)}"
    )


def _conclude(folder: Path) -> None:
    from polarlm.report import draw_loss, summary

    print(f"\n{summary(folder)}")
    print(f"\nloss drawn: {draw_loss(folder)}")


def _describe_fields() -> str:
    from polarlm.config import RunConfig, field_paths

    fields = {f"--{path.replace('_', '-')}": meaning for path, meaning in field_paths(RunConfig).items()}
    width = max(map(len, fields))
    return "fields of a run, each a flag:\n" + "\n".join(f"  {flag:<{width}}  {text}" for flag, text in fields.items())
