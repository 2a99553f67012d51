"""Ranks that hang end, and each says where; tests/faults has a whole run that hangs."""

import subprocess
import sys

from polarlm.config import dump_run, load_run

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


def test_ranks_in_one_place_are_told_together_and_the_time_starts_anew(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "ranks 0, 1, 2 in wait_for_ever, from wait_for_ever (stuck.py:7)" in line


LATE = """
import os, sys, time
from polarlm.train.__main__ import main
if os.environ["RANK"] == "1":
    time.sleep(300)
sys.argv[1:] = ["run"]
sys.exit(main())
"""


def test_a_rank_that_never_comes_to_the_meeting_is_not_waited_for(tmp_path):
    words = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --data.paths synthetic"
    flags = f"{words} --train.steps 1 --train.step-timeout 2".split()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(
        dump_run(load_run(None, environment={}, flags=flags, devices=2).config)
    )
    (tmp_path / "stuck.py").write_text(LATE)
    launch = LAUNCH.replace(", 3, ", ", 2, ")
    ended = subprocess.run(
        [sys.executable, "-c", launch], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert ended.returncode == 1
    assert "no rank took a step within train.step_timeout: rank 0 in " in line
    assert "from join_world (world.py:" in line
    assert "rank 1 did not answer" in line
