"""Jobs of a real Slurm, with a script of one's own, that are interrupted: they end soon."""

import os
import signal
import time

import pytest

from cluster.processes import eventually, working_in
from cluster.runs import POLARLM, RANK, SLOWLY, said, wait_for_step, write_run

pytestmark = pytest.mark.slurm


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
