"""The host's memory, and a thread that ends this process before the system would kill it."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PAUSE_S = 0.02
_RESERVE = 0.04  # of the host's memory: what all ranks may fill between two looks


class MemoryGuard(threading.Thread):
    """Looks at the memory that is left, and at what this process holds, until it is too much."""

    def __init__(self, limit: int | None, too_much: Callable[[], None]) -> None:
        """
        Args:
            limit: bytes that this process may hold; None is what the host has.
            too_much: called once, in this thread.
        """
        super().__init__(daemon=True)
        self._limit, self._too_much = limit, too_much

    def run(self) -> None:
        """Called by `start`."""
        while not self._is_too_much():
            time.sleep(_PAUSE_S)
        self._too_much()

    def _is_too_much(self) -> bool:
        total, left = host_memory()
        return left < _RESERVE * total or (self._limit is not None and resident_bytes() > self._limit)


def resident_bytes() -> int:
    """What this process holds of the host's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_memory() -> tuple[int, int]:
    """(bytes in all, bytes left) of the host, or of the control group that this process may not leave."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines}
    total, left = sizes["MemTotal:"], sizes["MemAvailable:"]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no group, or one without a limit
        return total, left
    return min(total, limit), min(left, limit - used)
