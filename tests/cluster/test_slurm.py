"""In jobs of a real Slurm: ranks find their places and each other, and train as they do without it."""

import pytest

from cluster.room import NODES
from cluster.runs import ALLREDUCE, POLARLM, metrics, places, train_here, write_run

pytestmark = pytest.mark.slurm

STEPS = 5


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 4), (2, 4)])
def test_the_ranks_of_a_step_find_their_places_and_each_other(slurm, tmp_path, nodes, ranks):
    slurm.run("srun", f"--nodes={nodes}", f"--ntasks={ranks}", *ALLREDUCE, folder=tmp_path)

    found = places(tmp_path)
    each = ranks // nodes
    assert [(place["rank"], place["world"]) for place in found] == [(rank, ranks) for rank in range(ranks)]
    assert [place["local_rank"] for place in found] == [rank % each for rank in range(ranks)]
    assert [place["local_world"] for place in found] == [each] * ranks
    assert [place["host"] for place in found] == [NODES[rank // each] for rank in range(ranks)]
    assert [place["total"] for place in found] == [float("1" * ranks)] * ranks


def test_a_job_trains_on_all_its_nodes_as_one_machine_does(slurm, tmp_path):
    run = write_run(tmp_path / "job", STEPS)
    job = slurm.submit(_script(tmp_path / "job", "train", "run.yaml"), "--nodes=2")
    assert job.wait() == "COMPLETED", (tmp_path / "job" / "out").read_text()

    assert metrics(run) == train_here(tmp_path / "here", STEPS, ranks=2)
    assert {path.name for path in (run / "logs").glob("*.log")} == {"nid0001.0.log", "nid0002.1.log"}


def _script(folder, *words):
    """A job that runs `polarlm` with these words; what it says is in `out`."""
    script = folder / "job.sh"
    command = " ".join([*POLARLM, *words])
    script.write_text(f"#!/bin/bash\n#SBATCH --output=out\nexec {command}\n")
    return script
