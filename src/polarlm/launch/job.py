"""One job of a run, called by its script: `python -m polarlm.launch.job RUN_FOLDER [...] -- COMMAND ...`

Runs the training, asks it to save before the walltime ends, tries again where that makes sense, submits the job that
goes on where it was asked to, and writes all of it into the run's `jobs.jsonl`.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polarlm.config import UserError, load_run_folder
from polarlm.launch.jobs.chain import Ending, describe_ending, reason_to_end, why_ended
from polarlm.launch.jobs.lead import lead_time
from polarlm.launch.jobs.record import read_jobs, saved_step, tries_since_submission, write_job_event
from polarlm.launch.jobs.schedulers import BATCH_SCHEDULERS, clock
from polarlm.launch.start.process import end_group
from polarlm.launch.start.watcher import caught_signals, guarded

__all__ = ["Assignment", "run_job"]

POLL_S = 0.25
LOOK_EVERY_S = 5.0  # at the run's files, which may lie far away


@dataclass(frozen=True)
class Assignment:
    """What a job is to do.

    Attributes:
        ends_at: when its walltime is over, in seconds since 1970.
        is_chain: others go on after it, and it may try again itself.
        next_script: submitted before it ends, while steps remain.
        retry_wait_s: from a crash to the next try, so that the network's resources are free again.
    """

    folder: Path
    command: list[str]
    job: str
    scheduler: str
    nodes: int
    walltime_s: int
    ends_at: float
    is_chain: bool
    next_script: Path | None
    retry_wait_s: float

    @property
    def request(self) -> dict[str, Any]:
        """What its scheduler was asked for, as `jobs.jsonl` has it."""
        return {"scheduler": self.scheduler, "nodes": self.nodes, "walltime_s": self.walltime_s}

    @property
    def left_s(self) -> float:
        """What is left of the walltime."""
        return self.ends_at - time.time()


def run_job(job: Assignment) -> int:
    """Try until the run is done, the walltime is over or another try makes no sense; return the job's exit code."""
    steps = load_run_folder(job.folder).train.steps
    assert steps is not None, "a run folder's configuration is resolved"
    _settle_lost_tries(job, steps)
    # Of a try in this very job: nodes that a scheduler hands out, or hands out again, are free.
    crashed_at: float | None = None
    with caught_signals() as arrived, guarded() as guard_input:
        while True:
            tries, step = tries_since_submission(read_jobs(job.folder)), saved_step(job.folder)
            if over := reason_to_end(tries, step, steps, (job.folder / "stop").exists()):
                _say(job, over[0])
                return over[1]
            if crashed_at is not None and not _wait_for_release(job, crashed_at, step, arrived):
                _say(job, "asked to end before it could try again")
                return 0
            ending, has_next = _try(job, step, steps, arrived, guard_input)
            why = why_ended(ending)
            can_retry = job.left_s > lead_time(job.folder, job.walltime_s) + job.retry_wait_s
            if job.is_chain and why == "crash" and can_retry:
                crashed_at = time.time()
                continue
            if why in ("walltime", "crash") and not has_next:
                _submit_next(job)
            return ending.code or 0


def _try(job: Assignment, step: int, steps: int, arrived: deque[int], guard_input: IO[str]) -> tuple[Ending, bool]:
    """(how one start of the training ended, whether the next job has been submitted)."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    facts = {"left_s": round(job.left_s), "step": step, "restarts": int(restarts) if restarts.isdecimal() else 0}
    write_job_event(job.folder, "began", job.job, time.time(), **job.request, **facts)
    process = subprocess.Popen(job.command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        guard_input.write(f"{process.pid}\n")
        guard_input.flush()
        asked, has_next = _watch(job, process, arrived)
    finally:
        end_group(process.pid)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    ending = Ending(code, asked, job.left_s, job.walltime_s, saved_step(job.folder), steps)
    _write_ending(job.folder, job.job, ending, time.time())
    _say(job, describe_ending(ending))
    return ending, has_next


def _watch(job: Assignment, process: subprocess.Popen, arrived: deque[int]) -> tuple[str | None, bool]:
    """Wait for the training; ask it once to save and end: on a signal, at the stop file, before the walltime's end."""
    asked, has_next = None, False
    lead_s = next_look = 0.0
    while asked is None and process.poll() is None:
        if time.monotonic() >= next_look:
            lead_s = lead_time(job.folder, job.walltime_s)
            next_look = time.monotonic() + min(LOOK_EVERY_S, lead_s / 4)
            asked = "stop file" if (job.folder / "stop").exists() else None
        if job.left_s <= lead_s:
            asked = asked or "walltime"
        asked = _asked_by(arrived) or asked
        time.sleep(0 if asked else POLL_S)
    if asked and process.poll() is None:
        _say(job, f"{asked}: asks the run to save and end, {clock(job.left_s)} before the walltime's end")
        process.send_signal(signal.SIGUSR1)
        has_next = asked == "walltime" and _submit_next(job)
        process.wait()
    return asked or _asked_by(arrived), has_next


def _asked_by(arrived: deque[int]) -> str | None:
    """What the signals that came mean: schedulers send SIGUSR1 before the walltime's end where they are told to."""
    numbers = {arrived.popleft() for _ in range(len(arrived))}
    if not numbers:
        return None
    return "walltime" if numbers == {signal.SIGUSR1} else "cancelled"


def _wait_for_release(job: Assignment, crashed_at: float, step: int, arrived: deque[int]) -> bool:
    """Wait until the network resources of the try that crashed are free; False when a signal came meanwhile."""
    until = crashed_at + job.retry_wait_s
    _say(job, f"waits {job.retry_wait_s:.0f} s for what the crashed try held, then tries again from step {step}")
    while time.time() < until and not arrived:
        time.sleep(POLL_S)
    return not arrived


def _submit_next(job: Assignment) -> bool:
    """Submit the job that goes on after this one, where that was asked for; False where it cannot be."""
    if job.next_script is None:
        return False
    at = time.time()
    try:
        next_job = BATCH_SCHEDULERS[job.scheduler].submit(job.next_script, after=job.job)
    except UserError as error:
        _say(job, f"error: the next job is not submitted: {error}")
        return False
    write_job_event(job.folder, "submitted", next_job, at, **job.request, queue=None, by="job")
    _say(job, f"job {next_job} goes on after this one")
    return True


def _settle_lost_tries(job: Assignment, steps: int) -> None:
    """Write down how a try ended whose job was killed too fast to do so, by the run's last sign of life.

    One of this same job was ended by the scheduler, which requeued the job, as after a node's failure: its script
    starts once each time. (Slurm counts these in SLURM_RESTART_COUNT, PBS tells its jobs nothing.)
    """
    folder = job.folder
    for before in read_jobs(folder):
        if not before.tries or before.tries[-1].ended is not None:
            continue
        lost = before.tries[-1]
        signs = [path.stat().st_mtime for path in (folder / "metrics.jsonl", folder / "events.jsonl") if path.exists()]
        last_sign = min(max([lost.began, *signs]), lost.ends_at)
        # The run was silent at the most for as long as it would have needed to save.
        left_s = lost.ends_at - last_sign
        left_s = 0.0 if left_s <= lead_time(folder, before.walltime_s) else left_s
        asked = "requeued" if before.id == job.job else None
        ending = Ending(None, asked, left_s, before.walltime_s, saved_step(folder), steps)
        _write_ending(folder, before.id, ending, last_sign)
        print(f"job {before.id}, before: {describe_ending(ending)}", flush=True)


def _write_ending(folder: Path, job: str, ending: Ending, at: float) -> None:
    facts = {"step": ending.step, "code": ending.code, "why": why_ended(ending), "left_s": round(ending.left_s)}
    write_job_event(folder, "ended", job, at, **facts)


def _say(job: Assignment, line: str) -> None:
    print(f"job {job.job}: {line}", flush=True)


def walltime_end(environment: Mapping[str, str], began: float, walltime_s: float) -> float:
    """When the walltime is over: the scheduler's word, else from when the script began."""
    told = environment.get("SLURM_JOB_END_TIME") or ""
    return float(told) if told.isdecimal() else began + walltime_s


def main() -> int:
    """Read what the script says, and run the job."""
    parser = argparse.ArgumentParser(prog="polarlm.launch.job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scheduler", choices=tuple(BATCH_SCHEDULERS), required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--walltime-s", type=int, required=True)
    parser.add_argument("--began", type=float, required=True, help="seconds since 1970")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--until-done", type=Path, metavar="SCRIPT")
    parser.add_argument("--retry-wait-s", type=float, default=60.0)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    job_id = os.environ.get(BATCH_SCHEDULERS[arguments.scheduler].job_variable) or str(os.getpid())
    job = Assignment(
        folder=arguments.folder,
        command=arguments.command,
        job=job_id,
        scheduler=arguments.scheduler,
        nodes=arguments.nodes,
        walltime_s=arguments.walltime_s,
        ends_at=walltime_end(os.environ, arguments.began, arguments.walltime_s),
        is_chain=arguments.chain or arguments.until_done is not None,
        next_script=arguments.until_done,
        retry_wait_s=arguments.retry_wait_s,
    )
    try:
        return run_job(job)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
