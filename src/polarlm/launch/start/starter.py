"""Who starts the processes: this one, or a launcher that reaches every host."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polarlm.config import UserError
from polarlm.launch.machines.allocation import Allocation, find_allocation
from polarlm.launch.machines.mpi import NO_MPI, find_mpi
from polarlm.launch.machines.sites import Site, recognise, site_named
from polarlm.launch.machines.spread import Request, Spread, count_devices, spread

__all__ = ["Scene", "Starter", "choose_starter", "look_around"]


@dataclass(frozen=True)
class Scene:
    """What is asked for, where, and how the ranks lie there."""

    request: Request
    environment: Mapping[str, str]
    allocation: Allocation
    site: Site | None
    spread: Spread


def look_around(request: Request, environment: Mapping[str, str]) -> Scene:
    """Find the hosts, the site, and the ranks on each host.

    Raises:
        UserError: the hosts cannot be found, or do not have what is asked for.
    """
    allocation = find_allocation(environment, request.hosts, request.host_file)
    site = site_named(request.site) if request.site is not None else recognise(allocation.hosts[0].address, environment)
    placed = spread(request, allocation, *count_devices(request, allocation, site, environment))
    return Scene(request, environment, allocation, site, placed)


@dataclass(frozen=True)
class Starter:
    """Who starts the processes on the hosts."""

    kind: str
    program: str
    why: str
    warnings: tuple[str, ...] = ()


def choose_starter(scene: Scene, is_dry: bool) -> Starter:
    """The launcher: the flag's; this process where all ranks are here; the site's; the scheduler's; an MPI's.

    Raises:
        UserError: it is not here, or the program of its name is another.
    """
    request, allocation, placed, site = scene.request, scene.allocation, scene.spread, scene.site
    is_one = len(placed.hosts) == 1 and allocation.is_here
    if request.launcher == "torchrun" and is_one:
        return Starter("torchrun", "", "torchrun: --launcher")
    if request.launcher == "local" and not is_one:
        names = ", ".join(host.name for host in placed.hosts)
        raise UserError(f"--launcher: local starts ranks on this machine alone, and they are to be on {names}")
    if request.launcher == "local" or (request.launcher is None and is_one):
        return Starter("local", "", "none: all ranks are on this machine, so this process starts them itself")
    if request.launcher not in (None, "torchrun"):
        wanted, why = request.launcher, "--launcher"
    elif site and site.launcher:
        wanted, why = site.launcher, f"site {site.name} says"
    elif allocation.scheduler == "slurm":
        wanted, why = "srun", "this is a Slurm job"
    else:
        hosts = len(placed.hosts)
        wanted, why = None, f"{hosts} host{'s' * (hosts > 1)} and no Slurm job"
    starter = _srun(why, is_dry) if wanted == "srun" else _mpi(wanted, why, request.launcher == wanted, is_dry)
    return (
        replace(starter, why=f"torchrun on each node, started by {starter.why}")
        if request.launcher == "torchrun"
        else starter
    )


def _srun(why: str, is_dry: bool) -> Starter:
    program = shutil.which("srun")
    if program:
        return Starter("srun", program, f"srun: {why}")
    if not is_dry:
        raise UserError(f"srun ({why}) is not on the PATH; load Slurm's module, or name another with --launcher")
    return Starter("srun", "srun", f"srun: {why}", ("srun is not on the PATH here",))


def _mpi(wanted: str | None, why: str, is_users: bool, is_dry: bool) -> Starter:
    """What is on the PATH counts, since it reads the options; what it was thought to be is only said."""
    program = find_mpi(wanted)
    if program is None:
        if not is_dry:
            raise UserError(NO_MPI)
        wanted = wanted or "mpich"
        return Starter(
            wanted, "mpiexec", f"{wanted}: {why}", (f"no mpiexec is on the PATH here; written as for {wanted}",)
        )
    found = f"{program.kind} {program.version}".strip()
    if wanted in (None, program.kind):
        return Starter(program.kind, program.path, f"{found}: {why}, and `--version` says so")
    if is_users:
        raise UserError(f"--launcher: {wanted} is asked for, but {program.path} says it is {found}; load the other one")
    complaint = f"{why} {wanted}, but {program.path} says it is {found}, and is taken for that"
    return Starter(program.kind, program.path, f"{found}: `--version` says so", (complaint,))
