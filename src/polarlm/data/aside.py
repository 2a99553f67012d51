"""Files that are written aside, hidden, and take their names when they are whole."""

import contextlib
import fcntl
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from polarlm.config import UserError


def aside_of(path: Path) -> Path:
    """Where this process writes a file until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def mark_as_written(file: BinaryIO) -> None:
    """Mark a file as being written for as long as it is open, on every host that sees it; a killed writer's mark goes
    with it."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned(path: Path) -> None:
    """Remove what writers of this file that were killed have left aside."""
    for aside in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        # Fails where a living writer holds it, or where nobody can tell.
        with contextlib.suppress(OSError), aside.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            aside.unlink()


def to_disk(file: BinaryIO) -> None:
    """Wait until all that was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def names_output(prefix: str | Path) -> Iterator[None]:
    """
    Raises:
        UserError: instead of an OSError; names the output.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{prefix}: cannot be written ({error}); choose another --output") from None
