"""Runs that `polarlm submit` hands to a real Slurm: whatever ends a job, the run goes on and ends as if nothing had."""

import json

import pytest

from cluster.processes import eventually
from cluster.runs import POLARLM, SLOWLY, metrics, said, train_here, wait_for_step, write_run
from cluster.slurm import Job

pytestmark = pytest.mark.slurm

WALLTIME = ("--walltime", "00:10:00")


def test_a_chain_goes_on_where_a_walltime_ended_a_job(slurm, tmp_path):
    steps = 200  # 40 s of pauses, see slowly/
    run = write_run(tmp_path, steps)
    first = _submit(slurm, tmp_path, run, *WALLTIME, "--until-done")
    wait_for_step(first, run, 3)
    # Slurm looks every 30 s which jobs have less time left than their signal wants.
    slurm.run("scontrol", "update", f"jobid={first.number}", "timelimit=2")
    assert eventually(lambda: len(_jobs(run)) == 2, 200), said(run)
    second = Job(slurm, _jobs(run)[1])

    assert [first.wait(), second.wait()] == ["COMPLETED", "COMPLETED"], said(run)
    assert [event["why"] for event in _events(run, "ended")] == ["walltime", "done"]
    assert 3 <= _events(run, "ended")[0]["step"] < steps
    assert len(_jobs(run)) == 2
    assert metrics(run) == train_here(tmp_path / "here", steps, ranks=2)


def test_a_job_that_is_signalled_and_then_loses_a_node_ends_as_if_undisturbed(slurm, tmp_path):
    steps = 60  # 12 s of pauses, see slowly/
    run = write_run(tmp_path, steps, "checkpoint: {every: 4, keep_last: 2}\n")
    job = _submit(slurm, tmp_path, run, *WALLTIME)
    wait_for_step(job, run, 5)
    slurm.run("scancel", "--signal=USR1", job.number)
    assert job.wait() == "COMPLETED", said(run)
    assert "asked to stop by SIG" in said(run)
    assert "\x1b" not in said(run)  # no bar, which is for a terminal
    last = metrics(run)[-1]["step"]
    assert last < steps
    assert (run / "checkpoints" / f"step-{last}" / "complete.json").exists()

    slurm.wait_until_idle()  # a node that still tidies up would refuse the job
    slurm.run("scontrol", "requeue", job.number)
    job.start_now()
    wait_for_step(job, run, last + 5)
    lost = job.nodes()[1]
    slurm.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        job.start_now()
        assert job.wait() == "COMPLETED", said(run)
        assert job.field("Restarts") == "2"
        assert lost not in job.nodes()
    finally:
        slurm.resume(lost)
    signalled, failed, ended = (event["why"] for event in _events(run, "ended"))
    assert (signalled, failed in ("requeued", "cancelled"), ended) == ("cancelled", True, "done")
    assert "waits" not in said(run)
    assert metrics(run) == train_here(tmp_path / "here", steps, ranks=2)


def _submit(slurm, folder, run, *words):
    """Submit the run, to be trained slowly, and return its first job."""
    slowly = {"PYTHONPATH": f"{SLOWLY}:{slurm.environment.get('PYTHONPATH', '')}"}
    command = [*POLARLM, "submit", "run.yaml", "--nodes", "2", "--devices-per-node", "1", *words]
    result = slurm.room.run(*command, folder=folder, environment=slurm.environment | slowly)
    assert result.returncode == 0, result.stderr
    return Job(slurm, _jobs(run)[0])


def _events(run, kind):
    path = run / "jobs.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def _jobs(run):
    return [int(event["job"]) for event in _events(run, "submitted")]
