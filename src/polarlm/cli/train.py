"""Train a model as a run file says, or go on with a run.

polarlm train run.yaml                             every field of the file is a flag too:
polarlm train run.yaml --train.steps 500 --parallel.ranks 2
polarlm train run.yaml --resume                    go on from the run's newest checkpoint
polarlm train runs/demo --resume                   the same, by the run's folder

In a job of PBS, Slurm or Cobalt the same command trains on every node (`polarlm launch --dry-run -- CMD` shows how).
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.config import RunConfig

TAKES_CONFIG_FLAGS = True
_RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run file and what is done with it; a run's fields are taken as flags without being declared."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run file, or a run's folder")
    parser.add_argument("--resume", action="store_true", help="go on with the run; start it if it has not begun")
    parser.add_argument("--show-config", action="store_true", help="print the resolved run, and train nothing")
    parser.epilog = _describe_fields()


def run(arguments: argparse.Namespace) -> int:
    """Check everything, start the ranks, and at the end draw and sum up what they did."""
    from polarlm.config import UserError, dump_run, load_run
    from polarlm.launch import Request, available_ranks, lock
    from polarlm.report import describe_layout

    _refuse_to_be_a_rank()
    is_folder = arguments.run is not None and arguments.run.is_dir()
    if is_folder and not (arguments.run / "config.yaml").exists():
        raise UserError(f"{arguments.run}: no config.yaml there, so this is not a run folder; give one, or a run file")
    loaded = load_run(
        arguments.run / "config.yaml" if is_folder else arguments.run,
        environment=os.environ,
        flags=arguments.config_flags,
        devices=available_ranks(Request(), os.environ),
    )
    config = _complete(loaded.config)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.show_config:
        print(dump_run(config), end="")
        return 0

    _check_launch(config)
    folder = (arguments.run if is_folder else _find_run(config)) if arguments.resume else None
    if folder is None and config.train.init_from:
        _check_weights(config)
    is_new = folder is None
    folder = folder or _make_folder(config)
    if is_new and folder.name != config.name:
        print(f"note: {_RUNS / config.name} is there already, so this new run is {folder}", file=sys.stderr)
    with lock.hold(folder):
        _fill_folder(folder, config, is_new)
        print(f"{folder}: {_introduce(config)}", flush=True)
        if config.parallel.ranks > 1:
            print(describe_layout(config), flush=True)
        code = _train(folder, config)
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


def _check_launch(config: "RunConfig") -> None:
    """Find out before anything is made whether these ranks can be started."""
    from polarlm.launch import Request, check_environment, prepare

    launch = prepare([], Request(ranks=config.parallel.ranks), os.environ, Path())
    if launch.kind == "local":
        check_environment(os.environ)
    for warning in launch.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _train(folder: Path, config: "RunConfig") -> int:
    """The ranks of this machine, or of the job's nodes."""
    from polarlm.launch import Request, prepare, run_local
    from polarlm.launch import run as run_launch

    command = [sys.executable, "-m", "polarlm.cli.rank", str(folder)]
    logs = (folder / "logs").resolve()
    launch = prepare(command, Request(ranks=config.parallel.ranks), os.environ, logs)
    if launch.kind == "local":
        return run_local(command, launch.spread.world, folder / "logs", os.environ)
    print(f"on {', '.join(host.name for host in launch.spread.hosts)}: {dict(launch.reasons)['launcher']}", flush=True)
    return run_launch(launch, logs, os.environ)


def _complete(config: "RunConfig") -> "RunConfig":
    """Fill in what the data and its tokenizer decide, and find out now whether they can be used."""
    from polarlm.config import default_name, with_tokenizer
    from polarlm.data import load_tokenizer, open_split, tokenizer_of

    tokenizer = config.data.tokenizer or tokenizer_of(config.data)
    config = with_tokenizer(config, tokenizer, load_tokenizer(tokenizer).vocab_size)
    splits = ("train", "validation") if config.train.eval_every else ("train",)
    for split in splits:
        open_split(config.data, config.train.seq_len, config.seed, split, config.model.vocab_size)
    return config.model_copy(update={"name": config.name or default_name(config)})


def _check_weights(config: "RunConfig") -> None:
    from polarlm.checkpoint import check_weights
    from polarlm.config import UserError

    try:
        check_weights(Path(config.train.init_from), config.model)
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None


def _find_run(config: "RunConfig") -> Path | None:
    """The newest run of this name, or None where it has not begun."""
    from polarlm.config import load_run_folder
    from polarlm.launch import run_folder

    newest = run_folder.find(_RUNS, config.name)
    if newest is None or load_run_folder(newest).name == config.name:
        return newest
    return _RUNS / config.name if (_RUNS / config.name).is_dir() else None


def _make_folder(config: "RunConfig") -> Path:
    """A new run's folder, empty but for its logs'."""
    from polarlm.config import UserError
    from polarlm.launch import run_folder

    try:
        return run_folder.create(_RUNS, config.name)
    except OSError as error:
        raise UserError(f"{_cannot_write(error)}, or choose another name") from None


def _fill_folder(folder: Path, config: "RunConfig", is_new: bool) -> None:
    """Put the resolved configuration and the tokenizer into the run's folder, and let it be the newest run.

    Raises:
        UserError: the run to go on with is not this one, or the system lets us write nothing; then no new one is left.
    """
    from polarlm.config import UserError, check_same_run, dump_run, load_run_folder
    from polarlm.data import load_tokenizer
    from polarlm.launch import run_folder

    if not is_new:
        check_same_run(load_run_folder(folder), config)
    try:
        if not (folder / "tokenizer").exists():
            load_tokenizer(config.data.tokenizer).save(folder / "tokenizer")
        aside = folder / ".config.yaml.partial"
        aside.write_text(dump_run(config), encoding="utf-8")
        os.replace(aside, folder / "config.yaml")
        run_folder.announce(folder)
    except OSError as error:
        if is_new:
            shutil.rmtree(folder)
        raise UserError(_cannot_write(error)) from None


def _cannot_write(error: OSError) -> str:
    return f"{error.filename or _RUNS}: cannot be written ({error.strerror}); mend that, or train in another folder"


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
