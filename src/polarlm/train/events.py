"""`events.jsonl`: what happened in a run besides its steps, one object an event."""

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any


class EventLog(logging.Handler):
    """The file of a run's events, written by one rank: evaluations, saves, and every warning of PolarLM's own.

    It is only ever added to, so that after a resume it still tells what was done twice.

    Attributes:
        step: how far the run has come.
        say: how the person in front of the terminal hears of a warning.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self.step = 0
        self.say: Callable[[str], None] = partial(print, flush=True)
        self._file = path.open("a", encoding="utf-8")
        logging.getLogger("polarlm").addHandler(self)

    def write(self, event: str, **facts: Any) -> None:
        """Append an event of the present step."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(json.dumps({"time": now, "step": self.step, "event": event} | facts) + "\n")
        self._file.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line of the log, called by `logging`."""
        self.write("warning", message=record.getMessage())
        self.say(f"warning: {record.getMessage()}")

    def close(self) -> None:
        """Hear no more, and close the file."""
        logging.getLogger("polarlm").removeHandler(self)
        self._file.close()
        super().close()
