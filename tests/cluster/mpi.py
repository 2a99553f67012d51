"""How the two MPIs are called, and what stands in for ssh when they start their own daemons on other hosts."""

import os
from pathlib import Path

import pytest

from cluster.provide import mpi_folder

MPIS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("mpich", "openmpi")]

# More ranks than cores, as root: Open MPI wants both said.
MPIEXEC = {
    "mpich": ("mpiexec", "-n"),
    "openmpi": ("mpiexec", "--allow-run-as-root", "--oversubscribe", "-n"),
}
_SSH = {"mpich": "HYDRA_LAUNCHER_EXEC", "openmpi": "PRTE_MCA_plm_ssh_agent"}


def environment(mpi: str, ssh: Path | None = None) -> dict[str, str]:
    """This process's environment, with that MPI first on the PATH, and the program it reaches other hosts with."""
    path = {"PATH": f"{mpi_folder(mpi) / 'bin'}:{os.environ['PATH']}"}
    return os.environ | path | ({_SSH[mpi]: str(ssh)} if ssh else {})
