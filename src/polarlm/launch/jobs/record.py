"""`jobs.jsonl`: the jobs of a run, written by who submits them and by the jobs themselves, an object an event.

`submitted` has a job's request; `began` and `ended` enclose a try, one start of the training in a job. A job that is
requeued, or that tries again after a crash, has several.
"""

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["Job", "Try", "read_jobs", "saved_step", "tries_since_submission", "write_job_event"]


@dataclass
class Try:
    """One start of the training in a job; times are seconds since 1970, steps those of saved checkpoints."""

    began: float
    ends_at: float
    first_step: int
    ended: float | None = None
    last_step: int | None = None
    code: int | None = None
    why: str | None = None

    @property
    def is_without_step(self) -> bool:
        """Whether it has ended, and saved nothing new."""
        return self.last_step is not None and self.last_step <= self.first_step


@dataclass
class Job:
    """A job of a run; `by` is user or job."""

    id: str
    scheduler: str | None = None
    nodes: int = 1
    walltime_s: int = 0
    queue: str | None = None
    submitted: float | None = None
    by: str | None = None
    tries: list[Try] = field(default_factory=list)


def write_job_event(run_folder: Path, event: str, job: str, at: float, **facts: Any) -> None:
    """Append an event of the time `at`; one write, so that two jobs' lines do not mix."""
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": time, "event": event, "job": job} | facts)
    descriptor = os.open(run_folder / "jobs.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def read_jobs(run_folder: Path) -> list[Job]:
    """The jobs in the order in which they were first heard of; a line that a crash spoiled is passed over."""
    try:
        text = (run_folder / "jobs.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    jobs: dict[str, Job] = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            name = str(record["job"])
            number = name.partition(".")[0]  # PBS names a job with its server, or without
            job = jobs.get(number, Job(name))
            _take_in(job, record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        jobs[number] = job
    return list(jobs.values())


def _take_in(job: Job, record: dict[str, Any]) -> None:
    at = datetime.fromisoformat(record["time"]).timestamp()
    if record["event"] == "submitted":
        by, queue = record["by"], record["queue"]
        _take_in_request(job, record)
        job.submitted, job.by, job.queue = at, by, queue
    elif record["event"] == "began":
        begun = Try(at, at + float(record["left_s"]), int(record["step"]))
        _take_in_request(job, record)
        job.tries.append(begun)
    elif record["event"] == "ended" and job.tries:
        last = job.tries[-1]
        last.last_step, last.code, last.why = int(record["step"]), record["code"], str(record["why"])
        last.ended = at


def _take_in_request(job: Job, record: dict[str, Any]) -> None:
    nodes, walltime_s = int(record["nodes"]), int(record["walltime_s"])
    job.scheduler, job.nodes, job.walltime_s = str(record["scheduler"]), nodes, walltime_s


def tries_since_submission(jobs: list[Job]) -> list[Try]:
    """The tries since a user last submitted the run, in order: what came before is none of this chain's."""
    since = max((job.submitted for job in jobs if job.submitted and job.by == "user"), default=0.0)
    return sorted((each for job in jobs for each in job.tries if each.began >= since), key=lambda each: each.began)


def saved_step(run_folder: Path) -> int:
    """The last step that a complete checkpoint has; 0 before the first."""
    marks = (run_folder / "checkpoints").glob("step-*/complete.json")
    numbers = (mark.parent.name.removeprefix("step-") for mark in marks)
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
