"""Jobs of a real Slurm that are interrupted in every way it has: they end soon, or go on as if nothing had been."""

import os
import signal
import time
from pathlib import Path

import pytest

from cluster.processes import eventually, working_in
from cluster.room import NODES
from cluster.runs import POLARLM, RANK, metrics, train_here, write_run

pytestmark = pytest.mark.slurm

STEPS = 60  # 12 s of pauses, see slowly/
CHECKPOINTS = "checkpoint: {every: 4, keep_last: 2}\n"
SLOWLY = Path(__file__).with_name("slowly")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Metrics of the run of two ranks that nothing interrupts."""
    return train_here(tmp_path_factory.mktemp("undisturbed"), STEPS, ranks=2)


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_job_that_loses_a_process_ends_within_seconds(victim, slurm, tmp_path):
    run = write_run(tmp_path, steps=10_000)
    job = slurm.submit(_script(tmp_path), "--nodes=2")
    _wait_for_step(job, run, 3)

    victims = {
        "rank": working_in(tmp_path, *RANK, rank=1),
        "launcher": working_in(tmp_path, *POLARLM, "train"),
    }
    (process,) = victims[victim]
    os.kill(process, signal.SIGKILL)
    lost_at = time.monotonic()
    assert job.wait() == "FAILED"
    assert time.monotonic() - lost_at < 30
    if victim == "rank":
        assert job.field("ExitCode") == "137:0"
        assert "error: rank 1 on nid0002 was ended by SIGKILL" in _said(run)
    assert eventually(lambda: not working_in(tmp_path))


def test_a_job_whose_node_fails_goes_on_on_another(slurm, tmp_path, undisturbed):
    run = write_run(tmp_path, STEPS, CHECKPOINTS)
    job = slurm.submit(_script(tmp_path, "--resume"), "--nodes=2", "--requeue")
    _wait_for_step(job, run, 9)

    slurm.run("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    try:
        job.start_now()
        assert job.wait() == "COMPLETED", _said(run)
        assert job.field("Restarts") == "1"
        assert NODES[1] not in job.nodes()
    finally:
        slurm.resume(NODES[1])
    assert metrics(run) == undisturbed


def test_a_job_that_is_signalled_saves_and_goes_on_when_it_is_requeued(slurm, tmp_path, undisturbed):
    run = write_run(tmp_path, STEPS, CHECKPOINTS)
    job = slurm.submit(_script(tmp_path, "--resume"), "--nodes=2")
    _wait_for_step(job, run, 5)

    slurm.run("scancel", "--signal=USR1", job.number)
    assert job.wait() == "COMPLETED", _said(run)
    last = metrics(run)[-1]["step"]
    assert last < STEPS
    assert (run / "checkpoints" / f"step-{last}" / "complete.json").exists()

    slurm.run("scontrol", "requeue", job.number)
    job.start_now()
    assert job.wait() == "COMPLETED", _said(run)
    assert metrics(run) == undisturbed


def test_a_job_saves_before_its_time_is_over_and_the_next_of_the_chain_goes_on(slurm, tmp_path):
    steps = 200
    run = write_run(tmp_path, steps)
    script = _script(tmp_path, "--resume")
    first = slurm.submit(script, "--nodes=2", "--time=9", "--signal=B:USR1@115")
    second = slurm.submit(script, "--nodes=2", f"--dependency=afterany:{first.number}")
    _wait_for_step(first, run, 3)
    # Slurm looks every 30 s which jobs have less time left than their signal wants.
    slurm.run("scontrol", "update", f"jobid={first.number}", "timelimit=2")
    assert first.wait() == "COMPLETED", _said(run)
    assert metrics(run)[-1]["step"] < steps
    assert "asked to stop by SIG" in _said(run)
    assert "\x1b" not in _said(run)  # no bar, which is for a terminal

    assert second.wait() == "COMPLETED", _said(run)
    assert metrics(run) == train_here(tmp_path / "here", steps, ranks=2)


def _script(folder, *words):
    """A job that trains slowly the first time, and then as fast as it can; what it says is added to `out`."""
    script = folder / "job.sh"
    command = " ".join([*POLARLM, "train", "run.yaml", *words])
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=out --open-mode=append\n"
        f"[ -e runs ] || export PYTHONPATH={SLOWLY}:$PYTHONPATH\n"
        f"exec {command}\n"
    )
    return script


def _wait_for_step(job, run, step):
    path = run / "metrics.jsonl"

    def is_there():
        assert job.field("JobState") in ("PENDING", "CONFIGURING", "RUNNING"), _said(run)
        return path.exists() and len(path.read_text().splitlines()) >= step

    assert eventually(is_there, 200), _said(run)


def _said(run):
    path = run.parents[1] / "out"
    return path.read_text() if path.exists() else "nothing yet"
