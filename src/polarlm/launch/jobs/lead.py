"""How long before its walltime's end a run has to be told, so that it saves in time: from its own steps and saves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["lead_time", "margin"]

_RESERVE = 1.5  # a file system is not always as fast as it was
_TAIL_BYTES = 64 * 1024


def lead_time(run_folder: Path, walltime_s: float) -> float:
    """Seconds from the signal to the end, with a reserve; at most half of the walltime.

    A signal waits for the step that is being taken and for the next, where all ranks hear of it; an evaluation may be
    due then; and the save follows. What the run has not done yet is taken to need a twentieth of the walltime, 5
    minutes at most.
    """
    unknown = min(300.0, walltime_s / 20)
    steps = [line["step_time_s"] for line in _tail(run_folder / "metrics.jsonl") if line.get("step_time_s")]
    events = [line for line in _tail(run_folder / "events.jsonl") if line.get("seconds")]
    saves = [line["seconds"] for line in events if line.get("event") == "save"]
    evaluations = [line["seconds"] for line in events if line.get("event") == "evaluation"]
    needed = 2 * max(steps, default=0.0) + max(evaluations, default=0.0) + max(saves, default=unknown)
    return min(margin(walltime_s) + _RESERVE * needed, walltime_s / 2)


def margin(walltime_s: float) -> float:
    """Seconds for ranks to part and schedulers to be late: a minute, a twentieth of a short walltime."""
    return min(60.0, walltime_s / 20)


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """The objects at a file's end; one that is half-written or cut off is left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
