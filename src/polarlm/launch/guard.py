"""Ends a run's processes when the one that watched over them is gone, even by SIGKILL.

A program of its own, started by `local.py`: on its standard input come the process groups to guard, one a line, then
`done` when the watcher has cleaned up itself. An end without that word means that the watcher died.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the end; without a last `done`, kill every group named."""
    lines = sys.stdin.read().split()
    if lines[-1:] == ["done"]:
        return
    for group in map(int, lines):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
