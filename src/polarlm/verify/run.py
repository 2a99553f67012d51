"""Layouts one after the other: what they compute against the reference, or what they send against the textbook."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch._dynamo  # noqa: F401  which an optimizer's first step imports: once here, instead of seconds in every fork

from polarlm.config import RunConfig, UserError
from polarlm.launch import Rank
from polarlm.parallel import World
from polarlm.verify.compare import BOUNDS
from polarlm.verify.layouts import Layout, parse_layout
from polarlm.verify.meeting import Meetings
from polarlm.verify.models import models_of, run_of
from polarlm.verify.rank import count_layout, in_world, try_layout
from polarlm.verify.reference import Reference, train_plainly
from polarlm.verify.rows import Row, Table
from polarlm.verify.task import Task
from polarlm.verify.traffic import TrafficRow, TrafficTable, check_counted
from polarlm.verify.workers import WorkerError, run_forked

TIMEOUT_S = 600.0


def do_task(task: Task, place: Rank | None = None) -> list[dict]:
    """Print a row as it comes, on the first process, and return all of them as records.

    Args:
        place: this process's, where a launcher started several; None forks all ranks here.
    """
    models = models_of(task.flags, even=task.traffic)
    names = task.layouts, [*models, ", ".join(models)]
    table = TrafficTable(*names) if task.traffic else Table(*names)
    speaks = not task.quiet and (place is None or place.rank == 0)
    if speaks:
        print(table.head, flush=True)
    records = []
    try_all = count_traffic if task.traffic else verify
    for row in try_all([parse_layout(name) for name in task.layouts], task.flags, task.ranks, place):
        records.append(row.as_json())
        if speaks:
            print(table.line(row), flush=True)
    return records


def verify(layouts: Iterable[Layout], flags: Sequence[str], ranks: int, place: Rank | None = None) -> Iterator[Row]:
    """Yield a row for each layout and model, as they come.

    Args:
        flags: the fields of a run that all layouts share, as words of a command line.
        ranks: how many there are; layouts of more are not tried.
        place: see `do_task`; processes that take no part in a layout have no row of it.
    """
    models = models_of(flags)
    alone = {name: run_of(model_flags, parse_layout("alone")) for name, model_flags in models.items()}
    references = {name: _in_fork(partial(train_plainly, config)) for name, config in alone.items()}

    def try_model(world: World, layout: str, name: str, config: RunConfig) -> Row:
        return try_layout(world, layout, name, config, references[name], BOUNDS[config.train.precision])

    yield from _each(layouts, models, _Ranks(ranks, place), run_of, try_model, Row)


def count_traffic(
    layouts: Iterable[Layout], flags: Sequence[str], ranks: int, place: Rank | None = None
) -> Iterator[TrafficRow]:
    """Yield what a step of each layout and model sends; arguments as of `verify`."""

    def run_to_count(model_flags: Sequence[str], layout: Layout) -> RunConfig:
        config = run_of(model_flags, layout)
        check_counted(config)
        return config

    models = models_of(flags, even=True)
    yield from _each(layouts, models, _Ranks(ranks, place), run_to_count, count_layout, TrafficRow)


class _Ranks:
    """How many ranks there are, and where they meet."""

    def __init__(self, count: int, place: Rank | None) -> None:
        self.count, self.meetings = count, Meetings(place)


def _each(
    layouts: Iterable[Layout],
    models: dict[str, list[str]],
    ranks: _Ranks,
    run_of_model: Callable[[Sequence[str], Layout], RunConfig],
    try_model: Callable[[World, str, str, RunConfig], Any],
    row: type,
) -> Iterator[Any]:
    """Yield what `try_model` makes of each layout and model, or a row that says why it did not come to that."""
    for layout in layouts:
        configs: dict[str, RunConfig] = {}
        refused: dict[str, list[str]] = {}
        for name, flags in models.items():
            try:
                if layout.ranks > ranks.count:
                    raise UserError(f"it takes {layout.ranks} ranks, and there are {ranks.count}")
                configs[name] = run_of_model(flags, layout)
            except UserError as error:
                refused.setdefault(_without_flags(error), []).append(name)
        for reason, names in refused.items():
            yield row(layout.name, ", ".join(names), layout.ranks, reason=reason, tried=False)
        if configs:
            yield from _try(layout, configs, ranks.meetings.seats(layout.ranks), try_model, row)
    ranks.meetings.leave()


def _without_flags(error: UserError) -> str:
    """In one line, without the flags that each fault begins with: a layout's are not what its user wrote."""
    return "; ".join(re.sub(r"^--[\w.-]+: ", "", fault) for fault in str(error).splitlines())


def _try(layout: Layout, configs: dict[str, RunConfig], seats: list, try_model: Callable, row: type) -> list[Any]:
    """All models on one layout, in processes that are forked for it and meet once."""

    def all_models(world: World) -> list[Any]:
        return [try_model(world, layout.name, name, config) for name, config in configs.items()]

    try:
        rows = run_forked([partial(in_world, seat, layout.ranks, all_models) for seat in seats], TIMEOUT_S)
    except WorkerError as error:
        print(error, file=sys.stderr, flush=True)
        reason = str(error).strip().splitlines()[-1]
        return [row(layout.name, name, layout.ranks, reason=reason) for name in configs]
    return rows[0] if rows else []


def _in_fork(call: Callable[[], Reference]) -> Reference:
    """Not here, where it would start threads that no later fork has."""
    (result,) = run_forked([call], TIMEOUT_S)
    return result
