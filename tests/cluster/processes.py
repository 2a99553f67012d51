"""Processes that work in a folder, on whichever machine of the room."""

import time
from collections.abc import Callable
from pathlib import Path


def working_in(folder: Path, *words: str, rank: int | None = None) -> list[int]:
    """Ids of the processes whose current folder it is; of those alone whose command line begins so, or of one rank."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_here = (process / "cwd").resolve(strict=True) == folder
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        is_rank = rank is None or f"RANK={rank}".encode() in environment
        if is_here and is_rank and command[: len(words)] == [word.encode() for word in words]:
            found.append(int(process.name))
    return found


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()
