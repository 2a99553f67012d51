"""Ranks on several machines: one launcher program that starts them, and is watched over here until all have ended."""

import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from polarlm.launch.start.blame import choose_cause, explain, explain_hang, hangs
from polarlm.launch.start.endings import Ending, forget_endings, read_endings
from polarlm.launch.start.local import run_local
from polarlm.launch.start.prepare import Launch
from polarlm.launch.start.process import end_group
from polarlm.launch.start.watcher import caught_signals, guarded

__all__ = ["run"]

POLL_S = 0.1
GRACE_S = 15.0  # from a rank's failure to the end of the launcher, which has to reach every host


def run(launch: Launch, log_folder: Path, environment: Mapping[str, str]) -> int:
    """Start what was prepared, and return when it has ended.

    Returns:
        as `run_local`: 0, or the code of the rank that failed first.
    """
    whole = launch.environment(environment)
    if launch.kind == "local":
        return run_local(launch.command, launch.spread.world, log_folder, whole, takes_socket=False)
    log_folder.mkdir(parents=True, exist_ok=True)
    forget_endings(log_folder)
    if launch.host_file:
        path, text = launch.host_file
        path.write_text(text, encoding="utf-8")
    with caught_signals() as arrived, guarded() as guard_input:
        process = subprocess.Popen(launch.command, env=whole, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            guard_input.write(f"{process.pid}\n")
            guard_input.flush()
            asked_to_stop = _wait(process, log_folder, arrived)
            return _conclude(process, launch, log_folder, asked_to_stop)
        finally:
            end_group(process.pid)


def _wait(process: subprocess.Popen, log_folder: Path, arrived: deque[int]) -> set[int]:
    """Wait for the launcher; pass signals on to it, and end it soon after a rank has failed.

    Ranks get SIGUSR1, which every launcher forwards: SIGTERM and SIGINT it takes as meant for itself.
    """
    asked_to_stop: set[int] = set()
    failed_at = None
    while process.poll() is None:
        while arrived:
            number = arrived.popleft()
            if number == signal.SIGINT and number in asked_to_stop:
                process.terminate()
            elif not asked_to_stop:
                process.send_signal(signal.SIGUSR1)
            if number == signal.SIGINT and not asked_to_stop:
                print("stopping: the ranks end what they can; Ctrl-C again ends them at once", file=sys.stderr)
            asked_to_stop.add(number)
        if failed_at is None and any(log_folder.glob("*.ended")):
            failed_at = time.monotonic()
        if failed_at is not None:
            _press(process, time.monotonic() - failed_at)
        time.sleep(POLL_S)
    return asked_to_stop


def _press(process: subprocess.Popen, since_failure: float) -> None:
    """A launcher ends by itself when a rank has failed; one that does not is asked to, and then made to."""
    if since_failure > 2 * GRACE_S:
        process.kill()
    elif since_failure > GRACE_S:
        process.terminate()


def _conclude(process: subprocess.Popen, launch: Launch, log_folder: Path, asked_to_stop: set[int]) -> int:
    """Show the rank that failed first, and give its code rather than the launcher's."""
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    endings = read_endings(log_folder)
    if not endings:
        if code and not asked_to_stop:
            print(
                f"error: {launch.command[0]} ended with code {code}, and no rank says that it failed", file=sys.stderr
            )
        return code
    cause: Ending = choose_cause(endings)
    if any(hangs(ending) for ending in endings):
        print(explain_hang(endings), file=sys.stderr, flush=True)
    elif not (asked_to_stop and cause.code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)):
        print(explain(cause), file=sys.stderr, flush=True)
    assert cause.code
    return cause.code
