"""Ranks that hang end, and each says where; tests/faults has a whole run that hangs."""

import subprocess
import sys

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
