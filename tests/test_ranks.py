"""The helper that runs tests on several ranks: results by rank, failures with their traceback, nothing left behind."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from polarlm.verify.workers import WorkerError
from ranks import run_ranks


def test_results_come_back_by_rank():
    torch.ones(512, 512) @ torch.ones(512, 512)
    results = run_ranks(2, lambda world, start: (world.rank, world.sum(start + world.rank), torch.ones(2)), 10)
    assert [result[:2] for result in results] == [(0, [21.0]), (1, [21.0])]
    assert torch.equal(results[1][2], torch.ones(2))


def test_one_rank_needs_no_process_group():
    assert run_ranks(1, lambda world: world.size) == [1]


def test_a_failing_rank_shows_its_traceback_and_ends_the_others():
    def fail(world):
        if world.rank == 1:
            raise KeyError("the cause")
        world.barrier()

    with pytest.raises(WorkerError, match=r"(?s)process 1 of 2 failed:.*in fail.*the cause"):
        run_ranks(2, fail)
    assert not multiprocessing.active_children()


def test_a_killed_rank_is_named():
    def die(world):
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerError, match="process 0 of 2 died with exit code -9"):
        run_ranks(2, die)


def test_a_hanging_rank_is_killed_in_time():
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"processes \[0, 1\] of 2 were not done in 2 s"):
        run_ranks(2, lambda world: time.sleep(300), timeout=2)
    assert time.monotonic() - start < 100
    assert not multiprocessing.active_children()
