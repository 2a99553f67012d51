"""What a run did, in a few lines of text."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from polarlm.report.metrics import Step, column, read_metrics

__all__ = ["summary"]


def summary(run_folder: Path) -> str:
    """Return a table of the run's length, losses and speed; what it did not measure has no line.

    Speeds are medians over the steps, which a slow first step or a pause for a checkpoint does not bend.

    Raises:
        UserError: the run has no metrics.
    """
    rows = _rows(read_metrics(run_folder))
    width = max(len(name) for name, _ in rows)
    table = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([str(run_folder.resolve().name), *table])


def _rows(steps: list[Step]) -> list[tuple[str, str]]:
    rows = [("steps", f"{steps[-1]['step']:,}")]

    def add(name: str, key: str, form: str, pick: Callable[[list[float]], float], scale: float = 1.0) -> None:
        values = [value for (value,) in column(steps, key)]
        if values:
            rows.append((name, form.format(pick(values) * scale)))

    def last(values: list[float]) -> float:
        return values[-1]

    add("tokens", "tokens", "{:,.0f}", last)
    _add_best(rows, steps, "training loss", "loss")
    _add_best(rows, steps, "validation loss", "val_loss")
    _add_best(rows, steps, "validation bits per byte", "val_bits_per_byte")
    add("tokens per second", "tokens_per_sec", "{:,.0f}", statistics.median)
    add("model TFLOPS per device", "model_tflops_per_device", "{:.3g}", statistics.median)
    add("MFU", "mfu", "{:.1f} %", statistics.median, 100)
    rows += _time(steps)
    add("peak memory", "peak_memory_bytes", "{:.2f} GiB", max, 2**-30)
    return rows


def _add_best(rows: list[tuple[str, str]], steps: list[Step], name: str, key: str) -> None:
    values = column(steps, key, "step")
    if not values:
        return
    last = values[-1][0]
    best, at = min((value for value in values if math.isfinite(value[0])), default=values[-1])
    note = "" if at == values[-1][1] else f" (best {best:.4f} at step {at})"
    rows.append((name, f"{last:.4f}{note}"))


def _time(steps: list[Step]) -> list[tuple[str, str]]:
    seconds = sum(value for (value,) in column(steps, "step_time_s"))
    if not seconds:
        return []
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
    return [("time in steps", text)]
