"""Services that follow a run beside `metrics.jsonl`. None of them can end a run: what fails is told, and left out."""

import csv
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from polarlm.config import RunConfig

_log = logging.getLogger("polarlm.train")

Metrics = Mapping[str, Any]


class Tracker(Protocol):
    """Takes a run's metrics, a step at a time."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """The run has ended."""


class CsvTracker:
    """`metrics.csv`, for a spreadsheet; a number that comes up later, as an evaluation's, becomes a new column."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._path = folder / "metrics.csv"
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        if self._file is None or not metrics.keys() <= set(self._columns):
            self._rewrite(step, metrics)
        csv.DictWriter(self._file, self._columns).writerow(metrics)
        self._file.flush()

    def close(self) -> None:
        """See `Tracker`."""
        if self._file:
            self._file.close()

    def _rewrite(self, step: int, metrics: Metrics) -> None:
        """Begin the table, or write it anew with the columns it lacks and without the steps that a resume repeats."""
        self.close()
        rows: list[dict[str, str]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as before:
                rows = list(csv.DictReader(before))
        self._columns = list(dict.fromkeys([*(rows[0] if rows else ()), *metrics]))
        aside = self._path.with_suffix(".partial")
        self._file = aside.open("w", newline="", encoding="utf-8")
        writer = csv.DictWriter(self._file, self._columns)
        writer.writeheader()
        writer.writerows(row for row in rows if int(row["step"]) < step)
        os.replace(aside, self._path)


class TensorBoardTracker:
    """Event files under `tensorboard/` in the run's folder."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases; offline, into the run's folder, unless `log.wandb_mode` says otherwise."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project="polarlm",
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
            mode=config.log.wandb_mode,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, RunConfig], Tracker]] = {
    "csv": CsvTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


class Trackers:
    """All trackers of a run that could be started, as one."""

    def __init__(self, names: Sequence[str], folder: Path, config: RunConfig) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self._trackers[name] = TRACKERS[name](folder, config)
            except ImportError as error:
                _log.warning("log.trackers: %s is left out, %s; pip install 'polarlm[trackers]'", name, error)
            except Exception as error:  # whatever ails a service, the run goes on
                _log.warning("log.trackers: %s is left out, it did not start (%s)", name, error)

    def log(self, step: int, metrics: Metrics) -> None:
        """Tell every tracker the numbers, those of a group as `group/name`; one that fails is told of and left out."""
        flat = dict(_flatten(metrics))
        self._each(lambda tracker: tracker.log(step, flat))

    def close(self) -> None:
        """Tell every tracker that the run has ended."""
        self._each(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # whatever ails a service, the run goes on
                _log.warning("log.trackers: %s is left out from here on (%s)", name, error)
                del self._trackers[name]


def _flatten(metrics: Metrics) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", each) for key, each in value.items())
        else:
            yield name, value
