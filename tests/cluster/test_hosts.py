"""Several hosts, each with an address of its own: ranks meet over the cable, whoever starts them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.mpi import MPIS, environment
from cluster.room import ADDRESSES, NODES
from cluster.runs import ALLREDUCE, POLARLM, RANK, TORCHRUN, metrics, places, prepare_run, train_here

pytestmark = pytest.mark.room

STEPS = 3
HOSTS = NODES[:2]


def test_a_torchrun_on_each_of_two_hosts_trains_as_one_host_does(room, tmp_path):
    run = prepare_run(tmp_path / "hosts", STEPS, ranks=2)
    place = ["--nnodes=2", f"--master-addr={ADDRESSES[HOSTS[0]]}", "--master-port=29500", "--nproc-per-node=1"]

    def torchrun(number):
        words = [*TORCHRUN, *place, f"--node-rank={number}", "--no-python", *RANK, run]
        return room.run(*words, node=HOSTS[number], folder=tmp_path, environment=None, timeout=200)

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(torchrun, range(2)))
    assert [result.returncode for result in results] == [0, 0], results
    assert metrics(run) == train_here(tmp_path / "here", STEPS, ranks=2)


@pytest.mark.parametrize("mpi", MPIS)
def test_polarlm_launch_starts_ranks_on_the_hosts_it_is_told(mpi, room, tmp_path):
    words = ["launch", "--hosts", ",".join(HOSTS), "--ranks-per-node", "2", "--", *ALLREDUCE]
    result = room.run(*POLARLM, *words, folder=tmp_path, environment=environment(mpi, room.ssh), timeout=200)

    assert result.returncode == 0, result.stdout + result.stderr
    found = places(tmp_path)
    assert [(place["rank"], place["local_rank"], place["host"]) for place in found] == [
        (0, 0, "nid0001"),
        (1, 1, "nid0001"),
        (2, 0, "nid0002"),
        (3, 1, "nid0002"),
    ]
    assert {place["total"] for place in found} == {1111.0}
