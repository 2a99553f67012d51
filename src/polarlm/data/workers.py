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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TypeVar

from polarlm.config import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # items with a worker: one in work, one waiting for it
# A pipe whose other side is gone: between two messages, while sending, or (a plain OSError) in the middle of a message.
_PIPE_ENDED = (EOFError, OSError)


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
        for item, pipe in zip(items, itertools.cycle(pipes), strict=False):
            if len(in_flight) == workers * _AHEAD:
                yield _result_from(in_flight.popleft())
            with _blames_the_worker():
                pipe.send(item)
            in_flight.append(pipe)
        while in_flight:
            yield _result_from(in_flight.popleft())


@contextmanager
def _blames_the_worker() -> Iterator[None]:
    try:
        yield
    except _PIPE_ENDED:
        raise UserError("a worker ended early, killed perhaps for want of memory; use fewer --workers") from None


def _result_from(pipe: Connection):
    with _blames_the_worker():
        result = pipe.recv()
    if isinstance(result, UserError):
        raise result
    return result


@contextmanager
def _worker(start: Callable[[], Callable[[Item], Result]]) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")  # a forked child would hold the other workers' pipes open
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(start, theirs), daemon=True)
    with _without_interrupts():
        process.start()
    try:
        theirs.close()
        yield ours
    finally:
        ours.close()
        process.kill()  # what it still does nobody waits for, and one that hangs is not waited for
        process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back here, and for good in the processes started meanwhile, which inherit that: it is the parent's to
    answer."""
    resource_tracker.ensure_running()  # spawn's own helper; starting it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(start: Callable[[], Callable[[Item], Result]], pipe: Connection) -> None:
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
        except _PIPE_ENDED:
            return


def _receive(pipe: Connection, waiting: queue.Queue[Item]) -> None:
    """Takes items while the worker works, so that neither side waits to send for the other to receive; whatever ends
    that ends the worker."""
    try:
        while True:
            waiting.put(pipe.recv())
    finally:
        os._exit(0)
