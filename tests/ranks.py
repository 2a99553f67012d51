"""Run a function on several ranks, in processes forked from the test: no second start of torch, so 2 ranks take about
a second.

    from ranks import run_ranks

    def total(world, start):
        return world.sum(start + world.rank)

    assert run_ranks(2, total, 10) == [[21.0], [21.0]]
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from polarlm.parallel import Device, World

_FORK = multiprocessing.get_context("fork")


def run_ranks(world_size: int, function: Callable, *args, timeout: float = 60) -> list:
    """Call `function(world, *args)` on every rank of a gloo world, and return what each gave, by rank.

    Args:
        function: any callable, a closure too; what it returns must be picklable (plain tensors are).
        timeout: seconds after which all ranks are killed.

    Raises:
        AssertionError: a rank raised (with its traceback), died or took too long; no process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        try:
            for rank in range(world_size):
                receiver, sender = _FORK.Pipe(duplex=False)
                work = (sender, rank, world_size, Path(folder) / "store", timeout, function, args)
                workers.append(_FORK.Process(target=_work, args=work))
                workers[-1].start()
                sender.close()
                pipes.append(receiver)
            return _collect(pipes, workers, timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _work(
    sender: Connection, rank: int, size: int, store: Path, timeout: float, function: Callable, args: tuple
) -> None:
    try:
        # A fork has none of its parent's threads, so it must not ask for them.
        torch.set_num_threads(1)
        if size > 1:
            meeting = dist.FileStore(str(store), size)
            dist.init_process_group(
                "gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
            )
        result = function(World(rank, size, Device(torch.device("cpu"))), *args)
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
        # Plain pickle: torch's own way over a pipe shares memory with a process that is about to end.
        report = pickle.dumps((True, result))
    except BaseException:
        report = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(report)


def _collect(pipes: list[Connection], workers: list, timeout: float) -> list:
    deadline = time.monotonic() + timeout
    results, failures, waiting = {}, {}, dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and not failures:
        ready = wait(list(waiting), max(0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} did not end within {timeout} s"
        for pipe in ready:
            rank = waiting.pop(pipe)
            is_good, value = _receive(pipe, workers[rank])
            (results if is_good else failures)[rank] = value
    assert not failures, "\n".join(f"rank {rank}:\n{failures[rank]}" for rank in sorted(failures))
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, worker: multiprocessing.Process) -> tuple[bool, object]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        worker.join()
        return False, f"died with exit code {worker.exitcode}"
