"""What the person in front of the terminal sees: one live line on a terminal, plain lines now and then in a log."""

import logging
import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_log = logging.getLogger("polarlm.train")
_SECONDS_BETWEEN_PLAIN_LINES = 5.0


class ProgressLine:
    """The progress of a run, on one rank; the other ranks are silent."""

    def __init__(self, steps: int, first_step: int, speaks: bool) -> None:
        self._steps, self._speaks = steps, speaks
        console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._plain = not console.is_terminal
        self._last_line = 0.0
        self._validation = ""
        self._started, self._first_step = time.monotonic(), first_step
        self._bar = Progress(
            TextColumn("[bold]step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not speaks or self._plain,
            speed_estimate_period=60,
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step)

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_sec: float, mfu: float) -> None:
        """Tell of a step that was taken."""
        if not self._speaks:
            return
        state = f"loss [bold]{loss:.3f}[/]{self._validation}  {tokens_per_sec:,.0f} tok/s  {mfu:.0%} MFU"
        self._bar.update(self._task, completed=step, description=state)
        now = time.monotonic()
        if step < self._steps and now - self._last_line < _SECONDS_BETWEEN_PLAIN_LINES:
            return
        self._last_line = now
        plain = state.replace("[bold]", "").replace("[/]", "")
        line = f"step {step}/{self._steps}  {plain}  {self._time_left(step, now)} left"
        _log.info(line)
        if self._plain:
            _print(line)

    def validated(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """Tell of an evaluation."""
        bits = "" if bits_per_byte is None else f", {bits_per_byte:.3f} bits per byte"
        self._validation = f"  val {loss:.3f}"
        self.say(f"step {step}: validation loss {loss:.3f}{bits}")

    def say(self, line: str) -> None:
        """Tell of something worth a line of its own."""
        if not self._speaks:
            return
        _log.info(line)
        if self._plain:
            _print(line)
        else:
            self._bar.console.print(line, markup=False)

    def _time_left(self, step: int, now: float) -> str:
        done = max(1, step - self._first_step)
        seconds = int((now - self._started) / done * (self._steps - step))
        hours, rest = divmod(seconds, 3600)
        return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _print(line: str) -> None:
    """Where nobody reads any more, as after `| head`, the run goes on in silence; its log has every line."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
