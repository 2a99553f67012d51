"""A run that hangs ends, and says which ranks were where."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAIN = (
    "--name hung --model.layers 1 --model.hidden 16 --model.heads 2 --train.seq-len 8 "
    "--train.steps 1000000 --log.every 1000 --parallel.ranks 2 --train.step-timeout 4"
)
STUCK = """
import os, sys, threading, time
from pathlib import Path
from polarlm.train.watchdog import Watchdog

def wait_for_ever():
    time.sleep(60)

threading.Thread(target=threading.Event().wait, daemon=True).start()
with Watchdog(1) as watchdog:
    Path(f"begun-{os.environ['RANK']}").touch()
    while len(list(Path().glob("begun-*"))) < 3:
        time.sleep(0.01)
    watchdog.begin()
    time.sleep(0.1)
    watchdog.begin()
    wait_for_ever()
"""
LAUNCH = (
    "import os, pathlib, sys; from polarlm.launch import run_local\n"
    "sys.exit(run_local([sys.executable, 'stuck.py'], 3, pathlib.Path('logs'), os.environ))"
)


def _ranks(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's ranks."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        found |= {int(item[5:]): int(child) for item in environment if item.startswith("RANK=")}
    return found


def test_a_rank_that_stops_ends_the_run_and_each_says_where_it_is(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-m", "polarlm", "train", *TRAIN.split()],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for line in run.stdout:
            if line.startswith("step"):
                break
        ranks = _ranks(run.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        stopped = time.monotonic()
        _, errors = run.communicate(timeout=50)
    finally:
        run.kill()
    assert run.returncode == 1
    assert time.monotonic() - stopped < 40
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert "no rank took a step within train.step_timeout" in line
    assert "rank 1 did not answer" in line
    assert "rank 0 in " in line
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks.values())


def test_ranks_in_one_place_are_told_together_and_the_time_starts_anew(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "ranks 0, 1, 2 in wait_for_ever, from wait_for_ever (stuck.py:7)" in line
