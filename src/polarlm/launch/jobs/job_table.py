"""The jobs of some runs as a table: from the runs' own files, and from the scheduler where they cannot tell."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.jobs.record import Job, Try, read_jobs, saved_step
from polarlm.launch.jobs.schedulers import BATCH_SCHEDULERS, clock

__all__ = ["job_table"]

_HEAD = ("run", "job", "state", "nodes", "walltime", "node-hours", "steps")


def job_table(run_folders: Sequence[Path]) -> list[str]:
    """Lines of a table with a row a job, and a line that sums up each run."""
    jobs = {folder: read_jobs(folder) for folder in run_folders}
    said = _ask_schedulers([job for each in jobs.values() for job in each if _own_state(job) is None])
    now = time.time()
    rows, sums = [_HEAD], []
    for folder, each in jobs.items():
        states = [_state(job, said, now) for job in each]
        hours = [_node_hours(job, state, folder, now) for job, state in zip(each, states, strict=True)]
        for job, state, spent in zip(each, states, hours, strict=True):
            walltime = clock(job.walltime_s)
            rows.append((folder.name, job.id, state, str(job.nodes), walltime, f"{spent:.2f}", _steps(job, folder)))
        sums.append(f"{folder.name}: {_progress(folder)}, {sum(hours):.2f} node-hours in {_count(len(each))}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*table, "", *sums]


def _own_state(job: Job) -> str | None:
    """What the run's files say for certain: how its last try ended."""
    last = job.tries[-1] if job.tries else None
    return last.why if last and last.ended is not None else None


def _ask_schedulers(jobs: Sequence[Job]) -> dict[str, dict[str, str]]:
    """Each scheduler's words, where it has jobs and can be asked."""
    said = {}
    for name, scheduler in BATCH_SCHEDULERS.items():
        numbers = [job.id for job in jobs if job.scheduler == name]
        if numbers and (states := scheduler.states(numbers)) is not None:
            said[name] = states
    return said


def _state(job: Job, said: Mapping[str, Mapping[str, str]], now: float) -> str:
    """The scheduler's word, where it knows the job; else what the files let one think."""
    if own := _own_state(job):
        return own
    states = said.get(job.scheduler or "")
    if states is not None:
        # It has forgotten a job that wrote down no end: one that was removed, or killed, or never came to train.
        return states.get(job.id.partition(".")[0], "killed" if job.tries else "gone")
    if not job.tries:
        return "submitted"
    return "running?" if now < job.tries[-1].ends_at else "killed"


def _node_hours(job: Job, state: str, folder: Path, now: float) -> float:
    return sum(_seconds(each, state, folder, now) for each in job.tries) * job.nodes / 3600


def _seconds(each: Try, state: str, folder: Path, now: float) -> float:
    """A try's time; one that was killed counts to the run's last sign of life."""
    if each.ended is not None:
        return each.ended - each.began
    if state != "killed":
        return now - each.began
    metrics = folder / "metrics.jsonl"
    last_sign = metrics.stat().st_mtime if metrics.exists() else each.began
    return max(0.0, min(last_sign, each.ends_at) - each.began)


def _steps(job: Job, folder: Path) -> str:
    """The saved steps it began and ended at."""
    if not job.tries:
        return ""
    last = job.tries[-1].last_step
    return f"{job.tries[0].first_step}-{saved_step(folder) if last is None else last}"


def _progress(folder: Path) -> str:
    from polarlm.config import load_run_folder  # and with it the libraries that starting ranks does without

    saved = saved_step(folder)
    try:
        return f"{saved} of {load_run_folder(folder).train.steps} steps saved"
    except UserError:
        return f"{saved} steps saved"


def _count(jobs: int) -> str:
    return f"{jobs} job{'s' * (jobs != 1)}"
