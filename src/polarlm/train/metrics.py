"""`metrics.jsonl`: what a run did, one object a step."""

import json
import math
import os
from pathlib import Path
from typing import Any

from polarlm.train.trackers import Trackers


class MetricsLog:
    """The file of a run's metrics, written by one rank."""

    def __init__(self, path: Path, after_step: int, trackers: Trackers | None = None) -> None:
        """Open for the steps after `after_step`; lines of later steps, which a resume takes again, are cut off.

        Args:
            trackers: are told the same.
        """
        self._path, self._trackers = path, trackers
        _keep_until(path, after_step)
        self._file = path.open("a", encoding="utf-8")

    def cut(self, after_step: int) -> None:
        """Take back the lines of the steps after `after_step`, which are taken again."""
        self._file.close()
        _keep_until(self._path, after_step)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; a value that JSON has no number for (NaN, infinity) is written as null."""
        self._file.write(json.dumps({key: _as_json(value) for key, value in line.items()}) + "\n")
        self._file.flush()
        if self._trackers:
            self._trackers.log(line["step"], line)

    def close(self) -> None:
        """Close the file and the trackers."""
        self._file.close()
        if self._trackers:
            self._trackers.close()


def _as_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_until(path: Path, step: int) -> None:
    """Rewrite the file, whole or not at all, without the lines of later steps and without what a crash spoiled."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    aside = path.with_suffix(".partial")
    aside.write_text(
        "".join(line for line in lines if line.endswith("\n") and _step_of(line) <= step), encoding="utf-8"
    )
    os.replace(aside, path)


def _step_of(line: str) -> float:
    """Infinity for what is no step, such as the zeros that a machine without power leaves at a file's end."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
