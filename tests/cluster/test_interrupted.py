"""Jobs of a real Slurm, with a script of one's own, that are interrupted: they end soon, or go on as if nothing had."""

import os
import signal
import time

import pytest

from cluster.processes import eventually, working_in
from cluster.runs import POLARLM, RANK, SLOWLY, metrics, said, train_here, wait_for_step, write_run

pytestmark = pytest.mark.slurm

STEPS = 60  # 12 s of pauses, see slowly/


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_job_that_loses_a_process_ends_within_seconds(victim, slurm, tmp_path):
    run = write_run(tmp_path, steps=10_000)
    job = slurm.submit(_script(tmp_path), "--nodes=2")
    wait_for_step(job, run, 3)

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
        assert "error: rank 1 on nid0002 was ended by SIGKILL" in said(run)
    assert eventually(lambda: not working_in(tmp_path))


def test_a_job_that_is_signalled_saves_and_goes_on_when_it_is_requeued(slurm, tmp_path):
    run = write_run(tmp_path, STEPS)
    job = slurm.submit(_script(tmp_path, "--resume"), "--nodes=2")
    wait_for_step(job, run, 5)

    slurm.run("scancel", "--signal=USR1", job.number)
    assert job.wait() == "COMPLETED", said(run)
    assert "asked to stop by SIG" in said(run)
    assert "\x1b" not in said(run)  # no bar, which is for a terminal
    last = metrics(run)[-1]["step"]
    assert last < STEPS
    assert (run / "checkpoints" / f"step-{last}" / "complete.json").exists()

    slurm.wait_until_idle()  # a node that still tidies up would refuse the job
    slurm.run("scontrol", "requeue", job.number)
    job.start_now()
    assert job.wait() == "COMPLETED", f"{job.field('Reason')} {job.field('ExitCode')} {said(run)}"
    assert metrics(run) == train_here(tmp_path / "here", STEPS, ranks=2)


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
