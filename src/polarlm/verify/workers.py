"""Calls in processes of their own, forked from this one: torch is imported once for all of them.

Whoever forks must have started no thread of torch's and asked no accelerator for anything, for neither lives on in a
fork; `polarlm verify` does all of that in the calls.
"""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

_FORK = multiprocessing.get_context("fork")


class WorkerError(Exception):
    """A call raised, died or took too long; the message says which, and shows a traceback that it left."""


def run_forked(calls: Sequence[Callable[[], object]], timeout: float) -> list[object]:
    """Make all calls at once, each in a process of its own; what they return is pickled, tensors by value.

    Raises:
        WorkerError: one of them failed or was not done in `timeout` seconds; none of them is left behind.
    """
    pipes, processes = [], []
    try:
        for call in calls:
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_work, args=(sender, call))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(sender: Connection, call: Callable[[], object]) -> None:
    try:
        # Plain pickle: torch's own way over a pipe shares memory with a process that is about to end.
        report = pickle.dumps((True, call()))
    except BaseException:
        report = pickle.dumps((False, f"failed:\n{traceback.format_exc()}"))
    sender.send_bytes(report)


def _collect(pipes: list[Connection], processes: list[ForkProcess], timeout: float) -> list[object]:
    deadline = time.monotonic() + timeout
    results: dict[int, object] = {}
    failures: list[str] = []
    waiting = {pipe: number for number, pipe in enumerate(pipes)}
    while waiting and not failures:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorkerError(f"processes {sorted(waiting.values())} of {len(pipes)} were not done in {timeout:.0f} s")
        for pipe in ready:
            number = waiting.pop(pipe)
            is_good, value = _receive(pipe, processes[number])
            if is_good:
                results[number] = value
            else:
                failures.append(f"process {number} of {len(pipes)} {value}")
    if failures:
        raise WorkerError("\n".join(failures))
    return [results[number] for number in range(len(pipes))]


def _receive(pipe: Connection, process: ForkProcess) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # before its report, or within
        process.join()
        return False, f"died with exit code {process.exitcode}"
