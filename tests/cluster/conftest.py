"""What these tests share: the room of machines, and a Slurm in it."""

import tempfile
from pathlib import Path

import pytest

from cluster.room import Room
from cluster.slurm import Slurm


@pytest.fixture(scope="session", autouse=True)
def cpu_only():
    """Every rank computes on the CPU, where there are accelerators too."""
    with pytest.MonkeyPatch.context() as patch:
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
