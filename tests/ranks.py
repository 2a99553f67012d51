"""Run a function on several ranks, in processes forked from the test: no second start of torch, so 2 ranks take about
a second.

    from ranks import run_ranks

    def total(world, start):
        return world.sum(start + world.rank)

    assert run_ranks(2, total, 10) == [[21.0], [21.0]]
"""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from polarlm.parallel import Device, World
from polarlm.verify.workers import run_forked


def run_ranks(world_size: int, function: Callable, *args, timeout: float = 60) -> list:
    """Call `function(world, *args)` on every rank of a gloo world, and return what each gave, by rank.

    Args:
        function: any callable, a closure too; what it returns must be picklable (plain tensors are).
        timeout: seconds after which all ranks are killed.

    Raises:
        WorkerError: a rank raised (with its traceback), died or took too long; no process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        work = [partial(_work, rank, world_size, store, timeout, function, args) for rank in range(world_size)]
        return run_forked(work, timeout)


def _work(rank: int, size: int, store: Path, timeout: float, function: Callable, args: tuple) -> object:
    # A fork has none of its parent's threads, so it must not ask for them.
    torch.set_num_threads(1)
    if size > 1:
        meeting = dist.FileStore(str(store), size)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    result = function(World(rank, size, Device(torch.device("cpu"))), *args)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result
