"""Services that follow a run beside `metrics.jsonl`. None of them can end a run: what fails is told, and left out."""

import csv
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

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
    """`metrics.csv`, for a spreadsheet; its columns are those of the first step and of an evaluation."""

    _EVALUATION = ("val_loss", "val_bits_per_byte", "val_tokens")

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._file = (folder / "metrics.csv").open("a", newline="", encoding="utf-8")
        self._writer: csv.DictWriter | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        """See `Tracker`."""
        if self._writer is None:
            columns = list(dict.fromkeys([*metrics, *self._EVALUATION]))
            self._writer = csv.DictWriter(self._file, columns, extrasaction="ignore")
            if self._file.tell() == 0:
                self._writer.writeheader()
        self._writer.writerow(metrics)
        self._file.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._file.close()


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
        """Tell every tracker; one that fails is told of and hears no more."""
        self._each(lambda tracker: tracker.log(step, metrics))

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
