"""What these tests share: the room of machines, and a Slurm in it."""

import os
import tempfile
from pathlib import Path

import pytest

from cluster.room import Room
from cluster.slurm import Slurm

# What launchers and schedulers tell the processes of a job, which these tests may be run in.
_LAUNCHERS = ("SLURM", "SBATCH_", "PBS_", "COBALT_", "PMI", "PALS_", "OMPI_", "PRTE_", "MPI_", "HYDRA_", "MV2_")
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session", autouse=True)
def plain_environment():
    """The environment of someone who has just logged in; and every rank computes on the CPU, whatever else there is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in _PLACES or name.startswith(_LAUNCHERS):
                patch.delenv(name)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def room():
    """Four nodes and a login machine."""
    # Not in pytest's own folder, which is closed to others: munge wants its socket where everybody may go.
    with tempfile.TemporaryDirectory(prefix="polarlm-room-") as folder:
        Path(folder).chmod(0o755)
        with Room(Path(folder)) as room:
            yield room


@pytest.fixture(scope="session")
def slurm(room):
    """A Slurm of those nodes."""
    return Slurm(room)
