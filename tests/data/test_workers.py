"""The processes that share a stream's work: results in order, and none of them left over however the work ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polarlm.config import UserError
from polarlm.data.workers import ordered_map

# A parent whose worker stands still from the start, so that the first large item fills the pipe and is never taken.
STUCK = """
import multiprocessing, os, signal
from polarlm.data.workers import ordered_map

def start():
    return len

def items():
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    print("sends to", worker.pid, flush=True)
    yield bytes(64 << 20)

if __name__ == "__main__":
    list(ordered_map(start, items(), 1))
"""


def squares():
    return lambda number: number * number


def refuses_seven():
    def refuse(number):
        if number == 7:
            raise UserError("seven")
        return number

    return refuse


def dies_at_seven():
    return lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 7 else bytes(1 << 20)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_items(workers):
    assert list(ordered_map(squares, range(20), workers)) == [number * number for number in range(20)]


def test_an_error_comes_where_its_result_was_due_and_ends_the_workers():
    results = ordered_map(refuses_seven, range(20), 2)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(UserError, match="seven"):
        next(results)
    assert children() == []


def test_a_worker_that_dies_is_an_error_of_one_line():
    with pytest.raises(UserError, match="a worker ended early") as error:
        list(ordered_map(dies_at_seven, range(20), 2))
    assert "\n" not in str(error.value)
    assert children() == []


def test_a_reader_that_goes_away_ends_the_workers():
    results = ordered_map(squares, range(1000), 2)
    assert next(results) == 0
    assert len(children()) == 2
    results.close()
    assert children() == []


def children() -> list[int]:
    """The workers of this process, in `/proc`'s words."""
    ours = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in ours if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_ctrl_c_in_the_middle_of_a_send_does_not_wait_for_the_worker(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline().split()[-1])
    time.sleep(0.5)  # until the pipe is full
    try:
        parent.send_signal(signal.SIGINT)
        _, message = parent.communicate(timeout=10)
        was_left = Path(f"/proc/{worker}").exists()
    finally:
        parent.kill()
        parent.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert message.rstrip().endswith("KeyboardInterrupt")
    assert not was_left
