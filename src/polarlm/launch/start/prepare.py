"""From what a user asks and where they stand to one command, its environment, and why each part is as it is."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.hostlist import Host
from polarlm.launch.machines.modules import loaded_names, missing_names
from polarlm.launch.machines.network import check_port, free_port, master_address, port_of_job
from polarlm.launch.machines.sites import Site
from polarlm.launch.machines.spread import Request, Spread
from polarlm.launch.start.launchers import BUILDERS, FORWARDING, Start, forwarded_names, host_file_text
from polarlm.launch.start.ranks import PLACE_NAMES, WORLD_SIZE
from polarlm.launch.start.starter import Scene, Starter, choose_starter, look_around

__all__ = ["Launch", "Setting", "available_spread", "prepare"]

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
        dropped: variables that would tell a rank the place that this process has.
        kept: variables that would be settings, had the user not set them.
        reasons: (part, what was chosen and why).
        warnings: what should be pointed out, a line each.
    """

    kind: str
    command: list[str]
    spread: Spread
    settings: tuple[Setting, ...]
    host_file: tuple[Path, str] | None
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` without what is dropped, and the settings."""
        left = {name: value for name, value in base.items() if name not in self.dropped}
        return {**left, **{setting.name: setting.value for setting in self.settings}}


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
    scene = look_around(request, environment)
    placed, site = scene.spread, scene.site
    starter = choose_starter(scene, is_dry)
    wanted = _settings(site)
    launch = Launch(
        kind=starter.kind,
        command=command,
        spread=placed,
        settings=tuple(setting for setting in wanted if not environment.get(setting.name)),
        host_file=None,
        dropped=tuple(name for name in PLACE_NAMES if name in environment),
        kept=tuple(setting.name for setting in wanted if environment.get(setting.name)),
        reasons=(
            ("site", f"{site.name} ({site.title})" if site else "none of those known (`polarlm sites` lists them)"),
            ("hosts", f"{' '.join(host.name for host in placed.hosts)}: {scene.allocation.source}"),
            ("ranks", f"{placed.world}: {placed.why}"),
            ("launcher", starter.why),
            ("software", _software(starter.kind, scene)),
        ),
        warnings=placed.warnings + starter.warnings,
    )
    if starter.kind in ("local", "torchrun"):
        return _on_this_machine(launch)
    whole = _on_its_hosts(launch, starter, scene, log_folder)
    return _with_each_alone(whole) if each_alone else whole


def available_spread(request: Request, environment: Mapping[str, str]) -> Spread:
    """The ranks, at least 1, that a launch would have which does not say a number.

    Raises:
        UserError: as `prepare`.
    """
    return look_around(request, environment).spread


def _on_this_machine(launch: Launch) -> Launch:
    if launch.kind == "torchrun":
        launch = replace(launch, command=[*_torchrun(launch.spread, "--standalone"), *launch.command])
    meeting = ("meeting", "on this machine, at a free port that the system chooses at the start")
    return replace(launch, reasons=(*launch.reasons, meeting))


def _on_its_hosts(launch: Launch, starter: Starter, scene: Scene, log_folder: Path) -> Launch:
    allocation, started = scene.allocation, launch.spread
    meeting = _meeting(scene)
    command = ["--logs", str(log_folder), "--", *launch.command]
    if scene.request.launcher == "torchrun":
        address, port = (setting.value for setting in meeting)
        place = [f"--nnodes={len(started.hosts)}", f"--master-addr={address}", f"--master-port={port}"]
        command = ["--per-node", "--logs", str(log_folder), "--", *_torchrun(started, *place), *launch.command]
        started = Spread(tuple(Host(host.name) for host in started.hosts), "one torchrun a node")
    settings = (*launch.settings, *meeting, Setting(WORLD_SIZE, str(started.world), "the launcher may not say"))
    options, binding = _options(starter.kind, scene, started)
    is_whole = allocation.scheduler is not None and len(started.hosts) == len(allocation.hosts)
    node_file = allocation.node_file if is_whole and started.ranks_per_node else None
    own_file = _host_file(starter.kind, started, node_file, log_folder)
    start = Start(
        program=starter.program,
        spread=started,
        is_whole=is_whole,
        host_file=own_file[0] if own_file else node_file,
        options=options,
        names=forwarded_names({*scene.environment, *(setting.name for setting in settings)} - {*PLACE_NAMES}),
        is_root=os.geteuid() == 0,
    )
    return replace(
        launch,
        command=[*BUILDERS[starter.kind](start), sys.executable, "-m", "polarlm.launch.enter", *command],
        settings=settings,
        host_file=own_file,
        reasons=(*launch.reasons, ("binding", binding)),
    )


def _host_file(kind: str, started: Spread, node_file: Path | None, folder: Path) -> tuple[Path, str] | None:
    """A file to be written; none where the scheduler's own serves. Open MPI would take its lines for slots."""
    text = host_file_text(kind, started)
    return None if text is None or (node_file and kind != "openmpi") else (folder / "hosts", text)


def _with_each_alone(launch: Launch) -> Launch:
    """Launchers end every process when one ends badly, and so does a Python that is missing on one host: a shell stands
    before it, which always ends well."""
    start = launch.command.index(sys.executable)
    shell = ["sh", "-c", '"$@" || exit 0', "sh"]
    return replace(launch, command=[*launch.command[:start], *shell, *launch.command[start:]])


def _settings(site: Site | None) -> list[Setting]:
    """What every rank should have: ours, and the site's, which count before ours."""
    ours = [Setting(name, value, "always") for name, value in _ALWAYS.items()]
    sites = [Setting(name, value, f"site {site.name}") for name, value in site.environment.items()] if site else []
    return list({setting.name: setting for setting in ours + sites}.values())


def _software(kind: str, scene: Scene) -> str:
    """How modules and a virtual environment that are active here come to be so for each rank."""
    environment, site = scene.environment, scene.site
    modules, missing = loaded_names(environment), missing_names(environment, site)
    folder = environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")
    active = [*filter(None, [folder]), *([f"modules {' '.join(modules)}"] if modules else [])]
    has = f", with {' and '.join(active)}" if active else ""
    wants = f"; of site {site.name}'s modules not loaded here: {' '.join(missing)}" if site and missing else ""
    return f"{FORWARDING[kind]}{has}{wants}"


def _meeting(scene: Scene) -> list[Setting]:
    """MASTER_ADDR and MASTER_PORT: the user's own, else the first host and the job's own port."""
    environment, allocation = scene.environment, scene.allocation
    address, why = environment.get("MASTER_ADDR"), "kept, it was set"
    if not address:
        address, why = master_address([host.address for host in scene.spread.hosts], allocation.is_here)
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


def _options(kind: str, scene: Scene, started: Spread) -> tuple[list[str], str]:
    """(the launcher's options for binding and what the site wants, why)."""
    site = scene.site if scene.site and scene.site.launcher == kind else None
    options = list(site.options) if site else []
    if chosen := scene.request.cpu_bind:
        forms = {"pals": ["--cpu-bind", chosen], "srun": [f"--cpu-bind={chosen}"]}
        bound, why = forms.get(kind, ["--bind-to", chosen]), "--cpu-bind"
    elif site and site.binding:
        bound, why = list(site.binding), f"site {site.name}"
    elif kind == "openmpi":
        bound, why = ["--bind-to", "none"], "else each rank with its threads gets one core, or one part of the node"
    else:
        bound, why = [], ""
    if kind == "srun" and not any(word.startswith("--cpus-per-task") for word in bound + options):
        cores, cores_why = _cores_per_task(scene, started)
        if cores:
            options.insert(0, f"--cpus-per-task={cores}")
            why = "; ".join(filter(None, [why, cores_why]))
    words = bound + options
    return words, f"{' '.join(words)} ({why})" if words else "none: the launcher's own, and the site says nothing"


def _cores_per_task(scene: Scene, started: Spread) -> tuple[int, str]:
    """srun gives each task one core, not its share, unless it is told."""
    if (asked := scene.environment.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        return int(asked), "SLURM_CPUS_PER_TASK"
    cores = scene.allocation.cpus_per_node
    if not (cores and started.ranks_per_node):
        return 0, ""
    return max(1, cores // started.ranks_per_node), f"{cores} cores of a node shared by {started.ranks_per_node}"
