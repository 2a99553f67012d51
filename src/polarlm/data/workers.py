"""A function over a stream on several processes: results in their order, a few items in flight, no process left over.

Items are dealt to the workers in turn, each over a pipe of its own. The pipe's end is how a worker learns that the work
is over, or that its parent was killed, and how the parent learns that a worker was.
"""

import itertools
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import TypeVar

from polarlm.config import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # items with a worker: one in work, one waiting for it


def ordered_map(start: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """The results of `start()`, which each worker calls once, on the items, in their order.

    Args:
        start: can be pickled, as can items and results.

    Raises:
        UserError: the function raised it, or a worker was killed.
    """
    with ExitStack() as started:
        pipes = [started.enter_context(_worker(start)) for _ in range(workers)]
        in_flight: deque[Connection] = deque()
        try:
            for item, pipe in zip(items, itertools.cycle(pipes), strict=False):
                if len(in_flight) == workers * _AHEAD:
                    yield _result_from(in_flight.popleft())
                pipe.send(item)
                in_flight.append(pipe)
            while in_flight:
                yield _result_from(in_flight.popleft())
        except (EOFError, ConnectionError):
            raise UserError("a worker ended early, killed perhaps for want of memory; use fewer --workers") from None


def _result_from(pipe: Connection):
    result = pipe.recv()
    if isinstance(result, UserError):
        raise result
    return result


@contextmanager
def _worker(start: Callable[[], Callable[[Item], Result]]) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")  # a forked child would hold the other workers' pipes open
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(start, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def _work(start: Callable[[], Callable[[Item], Result]], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    waiting: queue.Queue[Item] = queue.Queue()
    threading.Thread(target=_receive, args=(pipe, waiting), daemon=True).start()
    work = start()
    while True:
        try:
            result: Result | UserError = work(waiting.get())
        except UserError as error:
            result = error
        try:
            pipe.send(result)
        except ConnectionError:
            return


def _receive(pipe: Connection, waiting: queue.Queue[Item]) -> None:
    """Takes items while the worker works, so that neither side waits to send for the other to receive."""
    while True:
        try:
            waiting.put(pipe.recv())
        except (EOFError, ConnectionError):
            os._exit(0)
