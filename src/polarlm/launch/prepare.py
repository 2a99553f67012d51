"""From what a user asks and where they stand to one command, its environment, and why each part is as it is."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.allocation import Allocation, find_allocation
from polarlm.launch.hostlist import Host
from polarlm.launch.launchers import BUILDERS, Start, forwarded_names, host_file_text
from polarlm.launch.mpi import NO_MPI, find_mpi
from polarlm.launch.network import check_port, free_port, master_address, port_of_job
from polarlm.launch.ranks import WORLD_SIZE
from polarlm.launch.sites import Site, recognise, site_named
from polarlm.launch.spread import Request, Spread, count_devices, spread

__all__ = ["Launch", "Setting", "available_ranks", "prepare"]

# Set for every rank unless the user has; the first keeps kernels in the order they were given, which tensor parallelism
# counts on to send while it computes.
_ALWAYS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "IBV_FORK_SAFE": "1", "NCCL_DEBUG": "WARN", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Setting:
    """A variable that every rank gets, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Launch:
    """A launch, ready to run.

    Attributes:
        kind: local (this process starts the ranks itself), torchrun (on this machine), pals, mpich, openmpi or srun.
        command: what is run; for `local`, what each rank runs.
        spread: the ranks on their hosts.
        settings: variables added to the environment.
        host_file: a file to be written first, and its text.
        kept: variables that would be settings, had the user not set them.
        reasons: (part, what was chosen and why).
        warnings: what should be pointed out, a line each.
    """

    kind: str
    command: list[str]
    spread: Spread
    settings: tuple[Setting, ...]
    host_file: tuple[Path, str] | None
    kept: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` and the settings."""
        return {**base, **{setting.name: setting.value for setting in self.settings}}


@dataclass(frozen=True)
class _Starter:
    """Who starts the processes on the hosts."""

    kind: str
    program: str
    why: str
    warnings: tuple[str, ...] = ()


def prepare(
    command: list[str],
    request: Request,
    environment: Mapping[str, str],
    log_folder: Path,
    *,
    is_dry: bool = False,
    each_alone: bool = False,
) -> Launch:
    """Choose everything; starts nothing and writes nothing.

    Args:
        command: what each rank runs.
        log_folder: where each rank writes, on a file system that all hosts share.
        is_dry: a launcher that is not on the PATH is no error.
        each_alone: a process that fails, or cannot even start, ends no other.

    Raises:
        UserError: the hosts cannot be found, do not have what is asked for, or nothing here can start ranks on them.
    """
    allocation, site, placed = _place(request, environment)
    starter = _choose(request, allocation, placed, site, is_dry)
    wanted = _settings(site)
    launch = Launch(
        kind=starter.kind,
        command=command,
        spread=placed,
        settings=tuple(setting for setting in wanted if not environment.get(setting.name)),
        host_file=None,
        kept=tuple(setting.name for setting in wanted if environment.get(setting.name)),
        reasons=(
            ("site", f"{site.name} ({site.title})" if site else "none of those known (`polarlm sites` lists them)"),
            ("hosts", f"{' '.join(host.name for host in placed.hosts)}: {allocation.source}"),
            ("ranks", f"{placed.world}: {placed.why}"),
            ("launcher", starter.why),
        ),
        warnings=placed.warnings + starter.warnings,
    )
    if starter.kind in ("local", "torchrun"):
        return _on_this_machine(launch)
    uses_torchrun = request.launcher == "torchrun"
    whole = _on_its_hosts(launch, starter, uses_torchrun, request, allocation, site, environment, log_folder)
    return _with_each_alone(whole) if each_alone else whole


def available_ranks(request: Request, environment: Mapping[str, str]) -> int:
    """How many ranks a launch would have that does not say a number; at least 1.

    Raises:
        UserError: as `prepare`.
    """
    return _place(request, environment)[2].world


def _place(request: Request, environment: Mapping[str, str]) -> tuple[Allocation, Site | None, Spread]:
    allocation = find_allocation(environment, request.hosts, request.host_file)
    site = site_named(request.site) if request.site else recognise(allocation.hosts[0].address, environment)
    return allocation, site, spread(request, allocation, *count_devices(request, allocation, site, environment))


def _on_this_machine(launch: Launch) -> Launch:
    if launch.kind == "torchrun":
        launch = replace(launch, command=[*_torchrun(launch.spread, "--standalone"), *launch.command])
    meeting = ("meeting", "on this machine, at a free port that the system chooses at the start")
    return replace(launch, reasons=(*launch.reasons, meeting))


def _on_its_hosts(
    launch: Launch,
    starter: _Starter,
    uses_torchrun: bool,
    request: Request,
    allocation: Allocation,
    site: Site | None,
    environment: Mapping[str, str],
    log_folder: Path,
) -> Launch:
    meeting = _meeting(allocation, launch.spread, environment)
    command, started = ["--logs", str(log_folder), "--", *launch.command], launch.spread
    if uses_torchrun:
        address, port = (setting.value for setting in meeting)
        place = [f"--nnodes={len(started.hosts)}", f"--master-addr={address}", f"--master-port={port}"]
        command = ["--per-node", "--logs", str(log_folder), "--", *_torchrun(started, *place), *launch.command]
        started = Spread(tuple(Host(host.name) for host in started.hosts), "one torchrun a node")
    settings = (*launch.settings, *meeting, Setting(WORLD_SIZE, str(started.world), "the launcher may not say"))
    options, binding = _options(starter.kind, request, allocation, started, site, environment)
    text = host_file_text(starter.kind, started)
    is_whole = allocation.scheduler is not None and len(started.hosts) == len(allocation.hosts)
    use_as_it_is = is_whole and starter.kind != "openmpi" and started.ranks_per_node is not None
    own_file = None if text is None or (use_as_it_is and allocation.node_file) else (log_folder / "hosts", text)
    start = Start(
        program=starter.program,
        spread=started,
        is_whole=is_whole,
        host_file=own_file[0] if own_file else allocation.node_file,
        options=options,
        names=forwarded_names({*environment, *(setting.name for setting in settings)}),
        is_root=os.geteuid() == 0,
    )
    return replace(
        launch,
        command=[*BUILDERS[starter.kind](start), sys.executable, "-m", "polarlm.launch.enter", *command],
        settings=settings,
        host_file=own_file,
        reasons=(*launch.reasons, ("binding", binding)),
    )


def _with_each_alone(launch: Launch) -> Launch:
    """Launchers end every process when one ends badly, and so does a Python that is missing on one host: a shell stands
    before it, which always ends well."""
    start = launch.command.index(sys.executable)
    shell = ["sh", "-c", '"$@" || exit 0', "sh"]
    return replace(launch, command=[*launch.command[:start], *shell, *launch.command[start:]])


def _choose(request: Request, allocation: Allocation, placed: Spread, site: Site | None, is_dry: bool) -> _Starter:
    """The launcher: a flag's; this process where all ranks are here; the site's; the scheduler's; an MPI's.

    Raises:
        UserError: it is not here, or the program of its name is another.
    """
    is_one = len(placed.hosts) == 1 and allocation.is_here
    if request.launcher == "torchrun" and is_one:
        return _Starter("torchrun", "", "torchrun: --launcher")
    if request.launcher == "local" and not is_one:
        raise UserError(f"--launcher: local starts ranks on this machine alone, and they are to be on {_names(placed)}")
    if request.launcher == "local" or (request.launcher is None and is_one):
        return _Starter("local", "", "none: all ranks are on this machine, so this process starts them itself")
    if request.launcher not in (None, "torchrun"):
        wanted, why = request.launcher, "--launcher"
    elif site and site.launcher:
        wanted, why = site.launcher, f"site {site.name} says"
    elif allocation.scheduler == "slurm":
        wanted, why = "srun", "this is a Slurm job"
    else:
        wanted, why = None, f"{len(placed.hosts)} hosts and no Slurm job"
    starter = _srun(why, is_dry) if wanted == "srun" else _mpi(wanted, why, request.launcher == wanted, is_dry)
    return (
        replace(starter, why=f"torchrun on each node, started by {starter.why}")
        if request.launcher == "torchrun"
        else starter
    )


def _srun(why: str, is_dry: bool) -> _Starter:
    program = shutil.which("srun")
    if program:
        return _Starter("srun", program, f"srun: {why}")
    if not is_dry:
        raise UserError(f"srun ({why}) is not on the PATH; load Slurm's module, or name another with --launcher")
    return _Starter("srun", "srun", f"srun: {why}", ("srun is not on the PATH here",))


def _mpi(wanted: str | None, why: str, is_users: bool, is_dry: bool) -> _Starter:
    """What is on the PATH counts, since it reads the options; what it was thought to be is only said."""
    program = find_mpi(wanted)
    if program is None:
        if not is_dry:
            raise UserError(NO_MPI)
        wanted = wanted or "mpich"
        return _Starter(
            wanted, "mpiexec", f"{wanted}: {why}", (f"no mpiexec is on the PATH here; written as for {wanted}",)
        )
    found = f"{program.kind} {program.version}".strip()
    if wanted in (None, program.kind):
        return _Starter(program.kind, program.path, f"{found}: {why}, and `--version` says so")
    if is_users:
        raise UserError(f"--launcher: {wanted} is asked for, but {program.path} says it is {found}; load the other one")
    complaint = f"{why} {wanted}, but {program.path} says it is {found}, and is taken for that"
    return _Starter(program.kind, program.path, f"{found}: `--version` says so", (complaint,))


def _settings(site: Site | None) -> list[Setting]:
    """What every rank should have: ours, and the site's, which count before ours."""
    ours = [Setting(name, value, "always") for name, value in _ALWAYS.items()]
    sites = [Setting(name, value, f"site {site.name}") for name, value in site.environment.items()] if site else []
    return list({setting.name: setting for setting in ours + sites}.values())


def _meeting(allocation: Allocation, placed: Spread, environment: Mapping[str, str]) -> list[Setting]:
    """MASTER_ADDR and MASTER_PORT: the user's own, else the first host and the job's own port."""
    address, why = environment.get("MASTER_ADDR"), "kept, it was set"
    if not address:
        address, why = master_address([host.address for host in placed.hosts], allocation.is_here)
    port, port_why = check_port(environment), "kept, it was set"
    if port is None and allocation.job_id:
        port, port_why = port_of_job(allocation.job_id), f"from the job's number {allocation.job_id}"
        if allocation.is_here and (free := free_port(first=port)) != port:
            port, port_why = free, f"{port_why}; {port} is taken"
    elif port is None:
        port, port_why = free_port(), "there is no job's number; it is free on this machine"
    return [Setting("MASTER_ADDR", address, why), Setting("MASTER_PORT", str(port), port_why)]


def _torchrun(placed: Spread, *place: str) -> list[str]:
    if placed.ranks_per_node is None:
        raise UserError("--ranks-per-node: torchrun starts as many ranks on each host; give one number")
    program = [sys.executable, "-m", "torch.distributed.run", *place]
    return [*program, f"--nproc-per-node={placed.ranks_per_node}", "--no-python"]


def _options(
    kind: str,
    request: Request,
    allocation: Allocation,
    started: Spread,
    site: Site | None,
    environment: Mapping[str, str],
) -> tuple[list[str], str]:
    """(the launcher's options for binding and what the site wants, why)."""
    is_sites = site is not None and site.launcher == kind
    options = list(site.options) if is_sites else []
    if request.cpu_bind:
        forms = {"pals": ["--cpu-bind", request.cpu_bind], "srun": [f"--cpu-bind={request.cpu_bind}"]}
        bound, why = forms.get(kind, ["--bind-to", request.cpu_bind]), "--cpu-bind"
    elif is_sites and site.binding:
        bound, why = list(site.binding), f"site {site.name}"
    elif kind == "openmpi":
        bound, why = ["--bind-to", "none"], "else each rank with its threads gets one core, or one part of the node"
    else:
        bound, why = [], ""
    if kind == "srun" and not any(word.startswith("--cpus-per-task") for word in bound + options):
        cores, cores_why = _cores_per_task(allocation, started, environment)
        if cores:
            options.insert(0, f"--cpus-per-task={cores}")
            why = "; ".join(filter(None, [why, cores_why]))
    words = bound + options
    return words, f"{' '.join(words)} ({why})" if words else "none: the launcher's own, and the site says nothing"


def _cores_per_task(allocation: Allocation, started: Spread, environment: Mapping[str, str]) -> tuple[int, str]:
    """srun gives each task one core, not its share, unless it is told."""
    if (asked := environment.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        return int(asked), "SLURM_CPUS_PER_TASK"
    if not (allocation.cpus_per_node and started.ranks_per_node):
        return 0, ""
    share = max(1, allocation.cpus_per_node // started.ranks_per_node)
    return share, f"{allocation.cpus_per_node} cores of a node shared by {started.ranks_per_node}"


def _names(placed: Spread) -> str:
    return ", ".join(host.name for host in placed.hosts)
