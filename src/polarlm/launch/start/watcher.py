"""What a process that watches over a run's others has around it: signals caught, and a guard beside it."""

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from polarlm.launch import guard

__all__ = ["caught_signals", "guarded"]


@contextmanager
def caught_signals() -> Iterator[deque[int]]:
    """Collect the signals that ask a run to stop, instead of dying of them."""
    arrived: deque[int] = deque()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def guarded() -> Iterator[IO[str]]:
    """Have `guard.py` wait beside us, so that even our own SIGKILL leaves no rank; yields where to name the ranks."""
    program = [sys.executable, "-I", "-S", guard.__file__]
    waiting = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert waiting.stdin
    try:
        yield waiting.stdin
    finally:
        waiting.communicate("done\n")
