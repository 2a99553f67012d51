"""The machines a job may use, read from what its scheduler left in the environment and in files.

Order: `--hosts`, `--hostfile`, then the scheduler whose job this is (Slurm, PBS, Cobalt), else this machine. A variable
that is set decides; a program (`qstat`) is asked last. An empty variable is an unset one.
"""

import glob
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.hostlist import (
    Host,
    expand_nodelist,
    expand_tasks,
    merge_hosts,
    parse_hosts,
    read_host_file,
)
from polarlm.launch.machines.hosts import short_host_name, short_name
from polarlm.launch.machines.network import own_addresses

__all__ = ["Allocation", "find_allocation", "is_this_machine"]

PBS_FILES = Path("/var/spool/pbs/aux")  # where PBS puts each job's node file, named by the whole job id


@dataclass(frozen=True)
class Allocation:
    """Where ranks may start.

    Attributes:
        hosts: machines, each once, in the order given; the first is where the ranks meet.
        source: what said so, in a few words.
        scheduler: slurm, pbs or cobalt; None where a user or nobody listed the hosts.
        job_id: as the scheduler writes it.
        slots_given: whether the hosts' slots mean ranks (a user wrote them down, or a machine stands there repeatedly).
        devices_per_node: what the scheduler says; None where it does not.
        cpus_per_node: the same, cores as the scheduler counts them.
        node_file: the file the hosts are in, if a launcher can read it as it is: each host once, nothing else.
    """

    hosts: tuple[Host, ...]
    source: str
    scheduler: str | None = None
    job_id: str | None = None
    slots_given: bool = False
    devices_per_node: int | None = None
    cpus_per_node: int | None = None
    node_file: Path | None = None

    @property
    def is_here(self) -> bool:
        """Whether the first host, where the ranks meet, is this machine."""
        return is_this_machine(self.hosts[0])

    @property
    def uneven(self) -> bool:
        """Whether the hosts have different numbers of slots."""
        return len({host.slots for host in self.hosts}) > 1


def is_this_machine(host: Host) -> bool:
    """Whether a list means this machine, by its name or an address of its own."""
    return short_name(host.address) in ("localhost", short_host_name()) or host.address in {"::1", *own_addresses()}


def find_allocation(
    environment: Mapping[str, str], hosts: str | None = None, host_file: Path | None = None
) -> Allocation:
    """Find the machines.

    Raises:
        UserError: what should name them cannot be read or understood, or is missing in a job; says what was looked for.
    """
    if hosts is not None and host_file is not None:
        raise UserError("--hosts and --hostfile: give one of the two")
    if hosts is not None:  # an empty one is a variable of a script that was not set
        found = parse_hosts(hosts)
        return Allocation(found, "--hosts", slots_given=any(host.slots > 1 for host in found))
    if host_file is not None:
        return _from_host_file(host_file)
    for find in (_from_slurm, _from_pbs, _from_cobalt):
        if allocation := find(environment):
            return allocation
    return Allocation((Host(short_host_name()),), "no scheduler's job here, so this machine")


def _from_host_file(path: Path) -> Allocation:
    found = read_host_file(_read(path, f"--hostfile: {path}"), str(path))
    return Allocation(found, f"--hostfile {path}", slots_given=any(host.slots > 1 for host in found))


def _from_slurm(environment: Mapping[str, str]) -> Allocation | None:
    name = next((name for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environment.get(name)), None)
    job_id = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID") or None
    if name is None:
        if job_id:
            raise UserError(
                f"SLURM_JOB_ID={job_id} is set, but SLURM_JOB_NODELIST is not: say the hosts with --hosts a,b, "
                "or unset SLURM_JOB_ID to use this machine alone"
            )
        return None
    names = expand_nodelist(environment[name], name)
    slots = _slurm_slots(environment, len(names))
    return Allocation(
        merge_hosts(Host(host, count) for host, count in zip(names, slots, strict=True)),
        f"{name}={environment[name]}",
        scheduler="slurm",
        job_id=job_id,
        slots_given=bool(environment.get("SLURM_NTASKS_PER_NODE")),  # set where the user asked for so many
        devices_per_node=_slurm_devices(environment),
        cpus_per_node=_slurm_cpus(environment),
    )


def _slurm_slots(environment: Mapping[str, str], nodes: int) -> list[int]:
    """Tasks a node, where the job asked for some; the counts of a smaller step than the job do not count."""
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if environment.get(name):
            counts = expand_tasks(environment[name], name)
            counts = counts * nodes if len(counts) == 1 else counts
            if len(counts) == nodes and all(counts):
                return counts
    return [1] * nodes


def _slurm_devices(environment: Mapping[str, str]) -> int | None:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        # `4`, `a100:4` or `a100:2,v100:1`
        counts = re.findall(r"(?:^|[:,])([0-9]{1,9})(?=,|$)", environment.get(name) or "")
        if counts:
            return sum(map(int, counts))
    return None


def _slurm_cpus(environment: Mapping[str, str]) -> int | None:
    for name in ("SLURM_JOB_CPUS_PER_NODE", "SLURM_CPUS_ON_NODE"):
        if environment.get(name):
            return min(expand_tasks(environment[name], name))
    return None


def _from_pbs(environment: Mapping[str, str]) -> Allocation | None:
    """PBS_NODEFILE; else the file of exactly this job; else what `qstat` says of it."""
    named, job_id = environment.get("PBS_NODEFILE"), environment.get("PBS_JOBID") or None
    if not named and not job_id:
        return None
    if named and Path(named).is_file():
        return _from_node_file(Path(named), "PBS_NODEFILE", "pbs", job_id)
    if job_id and (path := _pbs_file_of(job_id)):
        return _from_node_file(path, f"PBS_JOBID={job_id}", "pbs", job_id)
    missing = f"PBS_NODEFILE={named} is not there" if named else f"PBS_JOBID={job_id} is set, but PBS_NODEFILE is not"
    if not job_id:
        raise UserError(f"{missing}, nor is PBS_JOBID set: say the hosts with --hostfile FILE or --hosts a,b")
    found, complaint = _ask_qstat(job_id)
    if not found:
        raise UserError(f"{missing}, and {complaint}: say the hosts with --hostfile FILE or --hosts a,b")
    return Allocation(merge_hosts(found), f"qstat -f {job_id}", scheduler="pbs", job_id=job_id)


def _pbs_file_of(job_id: str) -> Path | None:
    """The node file of this job and no other: 123 is not 1234, and 123.server is 123."""
    exact = PBS_FILES / job_id
    if exact.is_file():
        return exact
    of_any_server = [] if "." in job_id else list(PBS_FILES.glob(f"{glob.escape(job_id)}.*"))
    return of_any_server[0] if len(of_any_server) == 1 else None


def _ask_qstat(job_id: str) -> tuple[list[Host], str]:
    """The hosts of a job, or none and why: `exec_host = a/0*4+b/0*4`, which qstat wraps over lines."""
    try:
        answer = subprocess.run(["qstat", "-f", job_id], capture_output=True, text=True, errors="replace", timeout=30)
    except FileNotFoundError:
        return [], "there is no `qstat` here to ask"
    except subprocess.TimeoutExpired:
        return [], "`qstat` gave no answer in 30 s"
    text = re.sub(r"\n\t", "", answer.stdout)
    match = re.search(r"^\s*exec_host = (\S+)$", text, re.MULTILINE)
    if not match:
        return [], f"`qstat -f {job_id}` names no exec_host"
    return [Host(part.partition("/")[0]) for part in match[1].split("+")], ""


def _from_cobalt(environment: Mapping[str, str]) -> Allocation | None:
    named = environment.get("COBALT_NODEFILE")
    if not named:
        return None
    return _from_node_file(Path(named), "COBALT_NODEFILE", "cobalt", environment.get("COBALT_JOBID") or None)


def _from_node_file(path: Path, source: str, scheduler: str, job_id: str | None) -> Allocation:
    """A scheduler's file has a line a slot: its different names are the nodes, and the lines of one are its slots."""
    text = _read(path, f"{source}: {path}")
    hosts = read_host_file(text, str(path))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    allocation = Allocation(
        hosts,
        f"{source} ({path})" if source.startswith("PBS_JOBID") else f"{source}={path}",
        scheduler=scheduler,
        job_id=job_id,
        slots_given=any(host.slots > 1 for host in hosts),
    )
    return replace(allocation, node_file=path) if lines == [host.name for host in hosts] else allocation


def _read(path: Path, named: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{named}: cannot be read ({error.strerror}); mend the path") from None
