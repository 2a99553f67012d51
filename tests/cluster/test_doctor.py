"""What is asked of nodes, not of ranks, in a job of a real Slurm and with real MPIs: the doctor, and environments that
spread."""

import subprocess
import venv

import pytest

from cluster.mpi import MPIS, environment
from cluster.room import NODES
from cluster.runs import POLARLM


def polarlm_in_a_job(slurm, folder, *words):
    """Run `polarlm` in a job of four nodes, and return its state and what it said."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --output=out\nexec {' '.join([*POLARLM, *words])}\n")
    state = slurm.submit(script, "--nodes=4").wait()
    return state, (folder / "out").read_text()


@pytest.mark.slurm
def test_the_doctor_looks_at_every_node_and_lets_them_reach_each_other(slurm, tmp_path):
    state, said = polarlm_in_a_job(slurm, tmp_path, "doctor")
    assert state == "COMPLETED", said
    assert "ok       exchange   nid0001 and 3 more: two ranks all-reduce at " in said
    assert "ok       clocks     4 hosts agree within " in said
    assert said.splitlines()[-1].startswith("ok       exchange   one rank on each of 4 nodes all-reduce at ")


@pytest.mark.slurm
def test_an_environment_spreads_over_the_nodes(slurm, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    (tmp_path / "nodes").mkdir()
    to = f"'{tmp_path}/nodes/$SLURM_NODEID/env'"
    state, said = polarlm_in_a_job(slurm, tmp_path, "env", "stage", "env", "--to", to)
    assert state == "COMPLETED", said
    assert said.startswith("4 of 4 nodes have its ")
    (tmp_path / "env").rename(tmp_path / "away")
    for node in range(4):
        copy = tmp_path / "nodes" / str(node) / "env"
        code = "import sys; print(sys.prefix)"
        prefix = subprocess.run([copy / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
        assert prefix.stdout.strip() == str(copy)


@pytest.mark.room
@pytest.mark.parametrize("mpi", MPIS)
def test_both_work_with_an_mpi(mpi, room, tmp_path):
    def polarlm(*words):
        started = environment(mpi, room.ssh)
        command = (*POLARLM, *words, "--hosts", ",".join(NODES[:2]))
        result = room.run(*command, node=NODES[0], folder=tmp_path, environment=started, timeout=240)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    said = polarlm("doctor")
    assert f"ok       mpi        nid0001 and 1 more: {mpi} " in said
    assert said.splitlines()[-1].startswith("ok       exchange   one rank on each of 2 nodes all-reduce at ")

    venv.create(tmp_path / "env", with_pip=False)
    (tmp_path / "nodes").mkdir()
    assert polarlm("env", "stage", "env", "--to", f"{tmp_path}/nodes/$RANK/env").startswith("2 of 2 nodes have its ")
    assert sorted(path.name for path in (tmp_path / "nodes").iterdir()) == ["0", "1"]
