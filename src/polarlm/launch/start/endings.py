"""How ranks on other machines ended: each writes it down itself, for a launcher gives one code for all of them.

`<logs>/<host>.<rank>.ended` holds one JSON object; only ranks that failed have one.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Ending", "forget_endings", "read_endings"]

_SUFFIX = ".ended"


@dataclass
class Ending:
    """A rank that has run, as `blame` looks at it; the code is None while it runs."""

    rank: int
    host: str
    log: Path
    log_start: int
    code: int | None = None
    ended_at: float = float("inf")

    def write(self, code: int) -> None:
        """Write down that it failed, whole or not at all."""
        self.code, self.ended_at = code, time.time()
        record = {"rank": self.rank, "host": self.host, "code": code, "at": self.ended_at, "log_start": self.log_start}
        aside = self.log.with_suffix(".partial")
        aside.write_text(json.dumps(record), encoding="utf-8")
        os.replace(aside, self.log.with_suffix(_SUFFIX))

    def logged(self) -> list[str]:
        """Lines this rank wrote to its log since it started."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace").splitlines()


def read_endings(logs: Path) -> list[Ending]:
    """The ranks that have failed, in no order."""
    endings = []
    for path in logs.glob(f"*{_SUFFIX}"):
        record = json.loads(path.read_text(encoding="utf-8"))
        log = path.with_suffix(".log")
        endings.append(Ending(record["rank"], record["host"], log, record["log_start"], record["code"], record["at"]))
    return endings


def forget_endings(logs: Path) -> None:
    """Remove what an earlier launch left."""
    for path in logs.glob(f"*{_SUFFIX}"):
        path.unlink(missing_ok=True)
