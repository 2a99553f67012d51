"""The steps of a run, as its `metrics.jsonl` tells them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polarlm.config import UserError

__all__ = ["column", "read_metrics"]

Step = dict[str, Any]


def read_metrics(run_folder: Path) -> list[Step]:
    """Return the objects of `metrics.jsonl`, one a step.

    A last line without its end is a step still being written, or one a crash cut off: it is left out.

    Raises:
        UserError: there is no such file, no step in it, or a line that is not a JSON object.
    """
    path = run_folder / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{run_folder}: no metrics.jsonl there, so this is not the folder of a run that trained"
        ) from None
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    steps = [_step(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not steps:
        raise UserError(f"{path}: the run has not finished a step yet")
    return steps


def _step(line: str, place: str) -> Step:
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        step = None
    if not isinstance(step, dict) or type(step.get("step")) is not int:
        raise UserError(f"{place}: not a JSON object with a `step`; take this line out")
    return step


def column(steps: Iterable[Step], *keys: str) -> list[tuple[float, ...]]:
    """Return the values under `keys` of each step that has them all."""
    return [tuple(step[key] for key in keys) for step in steps if all(step.get(key) is not None for key in keys)]
