"""Prove on this machine that layouts compute what one process does: loss, every gradient, weights after three steps.

polarlm verify                                      every layout that this machine's ranks allow
polarlm verify --ranks 8 --layouts ring             those with ring attention
polarlm verify --layouts pipeline2-1f1b-tensor2     one, in the list or not
polarlm verify --traffic --layouts ulysses          what a step sends, beside the textbook's amounts
polarlm verify --model GPT125M --ranks 4            of a model of your own; every field of a run is a flag
torchrun --nproc-per-node 8 -m polarlm verify       on ranks that a launcher has started
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.launch import Rank
    from polarlm.verify import Task

TAKES_CONFIG_FLAGS = True
_CPU_RANKS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which layouts and how many ranks; a run's fields are taken as flags without being declared."""
    parser.add_argument("--ranks", type=int, metavar="N", help=f"by default every device, or {_CPU_RANKS} on a CPU")
    parser.add_argument("--layouts", default="all", metavar="NAMES", help="all, or names, or parts of names, by commas")
    parser.add_argument("--traffic", action="store_true", help="count each collective of a step, instead of comparing")
    parser.add_argument("--list", action="store_true", help="print the layouts' names, and try none")
    parser.add_argument("--json", action="store_true", help="the same as a JSON list, at the end")


def run(arguments: argparse.Namespace) -> int:
    """Try them; 1 if one is not right, or none could be tried: then nothing is proven."""
    from polarlm.launch import meet, rank_from
    from polarlm.verify import Task, choose_layouts

    layouts = choose_layouts(arguments.layouts)
    if arguments.list:
        print("\n".join(f"{layout.name}  {layout.ranks} rank{'s' * (layout.ranks > 1)}" for layout in layouts))
        return 0
    _refuse_axes(arguments.config_flags)
    _check_models(arguments.config_flags)
    place = rank_from(os.environ)
    place = place and meet(place, os.environ)
    task = Task(
        layouts=[layout.name for layout in layouts],
        flags=arguments.config_flags,
        ranks=_ranks(arguments.ranks, place),
        traffic=arguments.traffic,
        quiet=arguments.json,
    )
    if place is None:
        code, records = _on_ranks_of_our_own(task)
    else:
        code, records = _on_given_ranks(task, place)
    verdicts = {record["verdict"] for record in records}
    speaks = place is None or place.rank == 0
    if code == 0 and speaks:
        print(json.dumps(records, indent=2) if arguments.json else _sum_up(records))
    return code or int("FAILED" in verdicts or (speaks and "ok" not in verdicts))


def _refuse_axes(flags: list[str]) -> None:
    """A layout's name says its ranks and axes; a flag beside it would be passed over, or stop every other layout."""
    from polarlm.config import UserError

    for word in flags:
        flag = word.partition("=")[0].replace("_", "-")
        if flag == "--parallel.ranks":
            raise UserError(f"{flag}: a layout says its own; --ranks N is how many there are at most")
        if flag in ("--parallel.tensor", "--parallel.pipeline", "--parallel.context", "--parallel.context-ulysses"):
            raise UserError(f"{flag}: a layout says its axes; try one by its name, such as --layouts tensor2-data2")


def _check_models(flags: list[str]) -> None:
    """Find a user's mistake before anything starts."""
    from polarlm.verify import parse_layout
    from polarlm.verify.models import models_of, run_of

    for model_flags in models_of(flags).values():
        run_of(model_flags, parse_layout("alone"))


def _ranks(wanted: int | None, place: "Rank | None") -> int:
    """How many ranks there are to be.

    Raises:
        UserError: more are asked for than there are, or none.
    """
    from polarlm.config import UserError
    from polarlm.launch import local_devices

    there = place.world if place else local_devices()
    ranks = (there or _CPU_RANKS) if wanted is None else wanted
    if ranks < 1 or (there and ranks > there):
        limit = f"at most the {there} {'ranks' if place else 'devices'} there are" if there else "at least 1"
        raise UserError(f"--ranks: {ranks} cannot be; give {limit}")
    return ranks


def _on_ranks_of_our_own(task: "Task") -> tuple[int, list[dict]]:
    """One process, which forks the ranks of one layout after the other."""
    from polarlm.launch import run_local
    from polarlm.verify import load_result

    with tempfile.TemporaryDirectory(prefix="polarlm-verify-") as name:
        folder = Path(name)
        task.save(folder)
        command = [sys.executable, "-m", "polarlm.verify", name]
        code = run_local(command, 1, folder / "logs", os.environ)
        records = load_result(folder) if code == 0 else []
        if any(record["verdict"] == "FAILED" and record["reason"] for record in records):
            for log in (folder / "logs").iterdir():  # the tracebacks, before they are gone
                print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr, end="")
        return code, records


def _on_given_ranks(task: "Task", place: "Rank") -> tuple[int, list[dict]]:
    from polarlm.verify.run import do_task

    return 0, do_task(task, place)


def _sum_up(records: list[dict]) -> str:
    verdicts = [record["verdict"] for record in records]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("ok", "FAILED", "not tried")]
    return f"\n{', '.join(counts)}"
