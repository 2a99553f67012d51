"""What the ranks of a run wrote: found by rank and host, shown, and followed."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polarlm.config import UserError

__all__ = ["RankLog", "follow", "rank_logs", "tail"]

_POLL_S = 0.5
_NAME = re.compile(r"(?P<host>.+)\.(?P<rank>\d+)\.log")


@dataclass(frozen=True)
class RankLog:
    """One rank's log."""

    host: str
    rank: int
    path: Path


def rank_logs(run_folder: Path, rank: int | None = None, host: str | None = None) -> list[RankLog]:
    """The logs asked for, by rank; without a rank those of the host, without either the first rank's.

    A rank of several jobs has a log on each of its hosts; unless a host is named, the newest counts.

    Raises:
        UserError: there is none; says which there are.
    """
    matches = [(_NAME.fullmatch(path.name), path) for path in sorted((run_folder / "logs").glob("*.log"))]
    known = [RankLog(match["host"], int(match["rank"]), path) for match, path in matches if match]
    wanted = 0 if rank is None and host is None else rank
    found = [log for log in known if wanted in (None, log.rank) and host in (None, log.host)]
    if not found:
        others = [str(path) for match, path in matches if not match]
        there = f"hosts {', '.join(sorted({log.host for log in known}))}" if known else "no rank has started"
        who = f"{'any rank' if wanted is None else f'rank {wanted}'}{f' on {host}' if host else ''}"
        see = f"; see {others[-1]}" if others and not known else ""
        raise UserError(f"{run_folder / 'logs'}: no log of {who} ({there}){see}")
    if host is None:
        found = [max(found, key=lambda log: log.path.stat().st_mtime)]
    return sorted(found, key=lambda log: log.rank)


def tail(log: RankLog, lines: int) -> list[str]:
    """The last lines; what is no UTF-8 is replaced."""
    return log.path.read_bytes().decode(errors="replace").splitlines()[-lines:]


def follow(find: Callable[[], list[RankLog]], lines: int) -> Iterator[tuple[RankLog, str]]:
    """Every line from the last ones on, for ever; logs that come later, of a run's next job, from their beginning."""
    positions: dict[Path, int] = {}
    pieces: dict[Path, bytes] = {}
    is_first = True
    while True:
        for log in find():
            with log.path.open("rb") as file:
                file.seek(positions.get(log.path, 0))
                fresh = pieces.pop(log.path, b"") + file.read()
                positions[log.path] = file.tell()
            *whole, pieces[log.path] = fresh.split(b"\n")  # a line that is still being written waits
            for line in whole[-lines:] if is_first else whole:
                yield log, line.decode(errors="replace")
        is_first = False
        time.sleep(_POLL_S)
