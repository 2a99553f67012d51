"""Layouts, one after the other, against the reference."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch._dynamo  # noqa: F401  which an optimizer's first step imports: once here, instead of seconds in every fork

from polarlm.config import RunConfig, UserError
from polarlm.launch import Rank
from polarlm.parallel import World
from polarlm.verify.compare import BOUNDS
from polarlm.verify.layouts import Layout, parse_layout
from polarlm.verify.meeting import Meetings
from polarlm.verify.models import models_of, run_of
from polarlm.verify.rank import in_world, try_layout
from polarlm.verify.reference import Reference, train_plainly
from polarlm.verify.rows import Row, Table
from polarlm.verify.task import Task
from polarlm.verify.workers import WorkerError, run_forked

TIMEOUT_S = 600.0


def do_task(task: Task, place: Rank | None = None) -> list[dict]:
    """Print a row as it comes, on the first process, and return all of them as records.

    Args:
        place: this process's, where a launcher started several; None forks all ranks here.
    """
    speaks = not task.quiet and (place is None or place.rank == 0)
    models = list(models_of(task.flags))
    table = Table(task.layouts, [*models, ", ".join(models)])
    if speaks:
        print(table.head, flush=True)
    records = []
    for row in verify([parse_layout(name) for name in task.layouts], task.flags, task.ranks, place):
        records.append(row.as_json())
        if speaks:
            print(table.line(row), flush=True)
    return records


def verify(layouts: Sequence[Layout], flags: Sequence[str], ranks: int, place: Rank | None = None) -> Iterator[Row]:
    """Yield a row for each layout and model, as they come.

    Args:
        flags: the fields of a run that all layouts share, as words of a command line.
        ranks: how many there are; layouts of more are not tried.
        place: see `do_task`; processes that take no part in a layout have no row of it.
    """
    models = models_of(flags)
    alone = {name: run_of(model_flags, parse_layout("alone")) for name, model_flags in models.items()}
    references = {name: _in_fork(partial(train_plainly, config)) for name, config in alone.items()}
    meetings = Meetings(place)
    for layout in layouts:
        configs, refused = _configs(layout, models, ranks)
        yield from refused
        if configs:
            yield from _try(layout, configs, references, meetings)


def _configs(layout: Layout, models: dict[str, list[str]], ranks: int) -> tuple[dict[str, RunConfig], list[Row]]:
    """The models that this layout can carry, and a row a reason for those that it cannot."""
    configs: dict[str, RunConfig] = {}
    refused: dict[str, list[str]] = {}
    for name, flags in models.items():
        try:
            if layout.ranks > ranks:
                raise UserError(f"it takes {layout.ranks} ranks, and there are {ranks}")
            configs[name] = run_of(flags, layout)
        except UserError as error:
            refused.setdefault(_without_flags(error), []).append(name)
    return configs, [
        Row(layout.name, ", ".join(names), layout.ranks, reason=reason, tried=False)
        for reason, names in refused.items()
    ]


def _without_flags(error: UserError) -> str:
    """In one line, without the flags that each fault begins with: a layout's are not what its user wrote."""
    return "; ".join(re.sub(r"^--[\w.-]+: ", "", fault) for fault in str(error).splitlines())


def _try(
    layout: Layout, configs: dict[str, RunConfig], references: dict[str, Reference], meetings: Meetings
) -> list[Row]:
    """All models on one layout, in processes that are forked for it and meet once."""

    def all_models(world: World) -> list[Row]:
        return [
            try_layout(world, layout.name, name, config, references[name], BOUNDS[config.train.precision])
            for name, config in configs.items()
        ]

    seats = meetings.seats(layout.ranks)
    try:
        rows = run_forked([partial(in_world, seat, layout.ranks, all_models) for seat in seats], TIMEOUT_S)
    except WorkerError as error:
        print(error, file=sys.stderr, flush=True)
        reason = str(error).strip().splitlines()[-1]
        return [Row(layout.name, name, layout.ranks, reason=reason) for name in configs]
    return rows[0] if rows else []


def _in_fork(call: Callable[[], Reference]) -> Reference:
    """Not here, where it would start threads that no later fork has."""
    (result,) = run_forked([call], TIMEOUT_S)
    return result
