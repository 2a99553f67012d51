"""One job a run: who trains in a run's folder holds its lock, and a second one learns who that is."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.hosts import short_host_name


@contextlib.contextmanager
def hold(run_folder: Path) -> Iterator[None]:
    """Hold the run while the block lasts.

    The lock is the system's, on the open file `lock`, so that it goes with its holder however that ends. Where a file
    system has none, the holder's host and process, written in the file, stand for it.

    Raises:
        UserError: another job holds the run; says which process on which host, and since when. Or the folder cannot be
            written.
    """
    try:
        file = (run_folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{run_folder}: cannot be written ({error.strerror}); make it writable to train there"
        ) from None
    with file:
        if not _lock(file):
            raise UserError(f"{run_folder}: {_holder(file)} trains in it; wait for it, or end it first")
        file.truncate(0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = json.dumps({"host": short_host_name(), "pid": os.getpid(), "since": since})
        with contextlib.suppress(OSError):  # on a full disk, whose user may be about to prune, it holds without a name
            os.write(file.fileno(), holder.encode())
        try:
            yield
        finally:
            file.truncate(0)


def _lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return not _is_alive(_read(file))
    return True


def _is_alive(holder: dict) -> bool:
    """Whether that process is there; one on another host may be."""
    if holder.get("host") != short_host_name():
        return bool(holder)
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _holder(file) -> str:
    holder = _read(file)
    if not holder:
        return "another job"
    return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"


def _read(file) -> dict:
    file.seek(0)
    try:
        holder = json.load(file)
    except (ValueError, RecursionError):
        return {}
    is_one = isinstance(holder, dict) and holder.keys() >= {"host", "pid", "since"} and type(holder["pid"]) is int
    return holder if is_one else {}
