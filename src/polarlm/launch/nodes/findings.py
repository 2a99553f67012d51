"""What is right and wrong with machines, judged from facts alone: each check takes values and gives findings.

`ok` is as it should be, a `warning` is worth knowing, with a `fault` a run will not work; these two say how to mend it.
"""

import ipaddress
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from polarlm.launch.nodes.facts import Folder, NodeFacts

__all__ = ["Finding", "clocks", "examine", "exchange_of", "folder", "report", "same_everywhere"]

GIB = 1 << 30
LEAST_FREE, LITTLE_FREE = 1 * GIB, 10 * GIB
MOST_SKEW_S = 180.0
_SLOW = 0.5  # of the median rate of the nodes' exchanges
_STATUSES = ("ok", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        status: ok, warning or fault.
        topic: in one word.
        what: what was found.
        mend: what to do about it; nothing for ok.
        host: of several the one that it is about; nothing where it is about all or the only one.
    """

    status: str
    topic: str
    what: str
    mend: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        assert self.status in _STATUSES
        assert bool(self.mend) == (self.status != "ok"), self

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{self.status:<7}  {self.topic:<9}  {where}{self.what}" + (f" — {self.mend}" if self.mend else "")


def report(findings: Sequence[Finding]) -> str:
    """The findings as aligned lines; what is said of several hosts alike is one line.

    Of what is as it should be, one host's values stand for all; of what is not, every host is named.
    """
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for each in findings:
        own = (each.what, each.mend) if each.mend or not each.host else ()
        alike.setdefault((each.status, each.topic, *own), []).append(each)
    return "\n".join(str(replace(each[0], host=_hosts(each))) for each in alike.values())


def _hosts(alike: Sequence[Finding]) -> str:
    first, *others = alike
    if first.mend:
        return ", ".join(each.host for each in alike)
    return f"{first.host} and {len(others)} more" if others else first.host


def examine(nodes: Sequence[NodeFacts], scheduler: str | None, ahead_s: Mapping[str, float]) -> list[Finding]:
    """Everything that can be said of these machines.

    Args:
        scheduler: whose job this is in: pbs, slurm, cobalt, or None.
        ahead_s: seconds that each host's clock is ahead of this one's.
    """
    several = len(nodes) > 1
    found = [
        Finding(each.status, each.topic, each.what, each.mend, node.host if several else "")
        for node in nodes
        for each in _of_one(node, scheduler, several)
    ]
    if several:
        found += clocks(ahead_s)
        for topic, values in {
            "polarlm": {node.host: node.polarlm for node in nodes},
            "torch": {node.host: node.torch for node in nodes if node.torch},
            "python": {node.host: node.python for node in nodes},
            "driver": {node.host: f"{node.maker} {node.driver}".strip() for node in nodes},
            "devices": {node.host: str(node.devices) for node in nodes},
        }.items():
            found += same_everywhere(topic, values)
        found += _slow_ones({node.host: node.exchange_bytes_per_s for node in nodes if node.exchange_bytes_per_s})
    return found


def _of_one(node: NodeFacts, scheduler: str | None, several: bool) -> Iterator[Finding]:
    yield Finding("ok", "python", f"{node.python}, {node.executable}; polarlm {node.polarlm}")
    yield driver(node)
    yield torch_build(node)
    yield exchange(node)
    yield mpi(node, several, scheduler)
    yield commands(node, scheduler)
    for each in node.folders:
        yield folder(each)
    yield host_name(node, several)
    if several and not node.sees:
        yield Finding(
            "fault",
            "folders",
            "does not see what another node wrote in the current folder",
            "start in a folder that all nodes share",
        )


def driver(node: NodeFacts) -> Finding:
    """Does the driver answer, and does it show devices?"""
    if node.devices_complaint:
        return Finding("fault", "driver", node.devices_complaint, "leave this node out, and tell the site")
    if node.devices:
        return Finding("ok", "driver", f"{node.maker} {node.driver}, {_count(node.devices, 'device')}")
    if node.maker:
        mend = "unset the variable that hides them, or ask the job for some"
        return Finding("warning", "driver", f"{node.maker} {node.driver} is here, and shows no device", mend)
    return Finding("ok", "driver", "no accelerator here: ranks compute on the CPU")


def torch_build(node: NodeFacts) -> Finding:
    """Is torch here, and built for the devices that are?"""
    if node.torch_complaint:
        return Finding(
            "fault", "torch", f"cannot be used: {node.torch_complaint}", "install torch, or load the site's module"
        )
    built = f"{node.torch}, built for {node.built_for or 'the CPU'}"
    if node.devices and not node.built_for:
        return Finding(
            "fault",
            "torch",
            f"{built} alone, beside {node.maker}'s driver and {_count(node.devices, 'device')}",
            f"install the build for {node.maker} (pytorch.org, Get started), or load the site's module",
        )
    if node.devices and node.torch_devices < node.devices:
        return Finding(
            "fault",
            "torch",
            f"{built}, sees {node.torch_devices} of {_count(node.devices, 'device')}",
            f"install a torch as old as {node.maker}'s driver {node.driver}, or a newer driver",
        )
    return Finding("ok", "torch", f"{built}, sees {_count(node.torch_devices, 'device')}")


def exchange(node: NodeFacts) -> Finding:
    """Did two ranks of this machine reach each other?"""
    if node.torch_complaint:
        return Finding("warning", "exchange", "not tried, without torch", "mend torch first")
    return exchange_of("two ranks", node.exchange_bytes_per_s, node.exchange_on, node.exchange_complaint)


def exchange_of(whom: str, bytes_per_s: float, over: str, complaint: str) -> Finding:
    """What came of an all-reduce."""
    if complaint:
        said = "no end in 2 minutes" if "SIGALRM" in complaint else complaint
        mend = "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to an interface that works; NCCL_DEBUG=INFO says more"
        return Finding("fault", "exchange", f"{whom} cannot all-reduce: {said}", mend)
    return Finding("ok", "exchange", f"{whom} all-reduce at {bytes_per_s / 1e9:.2f} GB/s ({over})")


def mpi(node: NodeFacts, several: bool, scheduler: str | None) -> Finding:
    """Is there a launcher for several machines?"""
    if node.mpi:
        return Finding("ok", "mpi", node.mpi)
    if node.mpi_complaint:
        return Finding("warning", "mpi", *_split(node.mpi_complaint))
    if several and not (scheduler == "slurm" and "srun" in node.commands):
        mend = "load the site's MPI module, or pip install mpich"
        return Finding("fault", "mpi", "no mpiexec, mpirun or srun to start ranks on several nodes", mend)
    return Finding("ok", "mpi", "no mpiexec or mpirun, and none is needed")


def commands(node: NodeFacts, scheduler: str | None) -> Finding:
    """Are the commands of the scheduler here whose job this is?"""
    here = f"{' '.join(node.commands)} on the PATH" if node.commands else "none on the PATH"
    if scheduler == "slurm" and "srun" not in node.commands:
        return Finding("fault", "scheduler", "a Slurm job, and srun is not on the PATH", "load Slurm's module")
    return Finding("ok", "scheduler", f"{f'a job of {scheduler}' if scheduler else 'no job'}; {here}")


def folder(each: Folder, least_bytes: float = LEAST_FREE, little_bytes: float = LITTLE_FREE) -> Finding:
    """Can a run write here, and for how long?

    Args:
        least_bytes: less than this is a fault.
        little_bytes: less than this is worth a word.
    """
    if each.complaint:
        mend = "mend that, or choose another"
        return Finding("fault", each.purpose, f"{each.path}: cannot be written ({each.complaint})", mend)
    free = f"{each.path}: {_gib(each.free_bytes)} free"
    if each.free_bytes < least_bytes:
        return Finding("fault", each.purpose, f"{free} of at least {_gib(least_bytes)}", "remove what is not needed")
    if each.free_bytes < little_bytes:
        mend = f"make room: checkpoints may come to {_gib(little_bytes)}"
        return Finding("warning", each.purpose, free, mend)
    return Finding("ok", each.purpose, free)


def host_name(node: NodeFacts, several: bool) -> Finding:
    """Does the machine's own name lead to it, from elsewhere too?"""
    mend = "if ranks do not meet, set MASTER_ADDR to an address of the first node that the others reach"
    if not node.own_addresses:
        return Finding("warning", "name", f"{node.host} resolves to nothing here", mend)
    addresses = ", ".join(node.own_addresses)
    if several and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in node.own_addresses):
        return Finding("warning", "name", f"{node.host} resolves to {addresses}, which is loopback", mend)
    also = ""
    if node.full_name.partition(".")[0] == "localhost" != node.host:
        also = "; getfqdn() says localhost, and is not asked"
    return Finding("ok", "name", f"{node.host} resolves to {addresses}{also}")


def clocks(ahead_s: Mapping[str, float], most_s: float = MOST_SKEW_S) -> list[Finding]:
    """Hosts whose clock is far from the others' median; logs are hard to compare then, and nothing else goes wrong."""
    if len(ahead_s) < 2:
        return []
    median = statistics.median_low(ahead_s.values())
    far = {host: seconds - median for host, seconds in ahead_s.items() if abs(seconds - median) > most_s}
    if not far:
        spread = max(ahead_s.values()) - min(ahead_s.values())
        return [Finding("ok", "clocks", f"{len(ahead_s)} hosts agree within {spread:.1f} s")]
    return [
        Finding(
            "warning",
            "clocks",
            f"the clock is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}",
            "logs' times will not compare; have the site set it",
            host,
        )
        for host, seconds in far.items()
    ]


def same_everywhere(topic: str, by_host: Mapping[str, str]) -> list[Finding]:
    """A fault for each host whose version is not the one that most have."""
    if len(set(by_host.values())) < 2:
        return []
    most = statistics.mode(by_host.values())
    example = next(host for host, value in by_host.items() if value == most)
    return [
        Finding(
            "fault",
            topic,
            f"{topic} is {value or 'none'}, and {most or 'none'} on {example}",
            "bring the same to every node, or leave this one out",
            host,
        )
        for host, value in by_host.items()
        if value != most
    ]


def _slow_ones(rates: Mapping[str, float]) -> list[Finding]:
    median = statistics.median(rates.values()) if rates else 0.0
    return [
        Finding(
            "warning",
            "exchange",
            f"{rate / 1e9:.2f} GB/s, where half of the nodes have {median / 1e9:.2f} or more",
            "every rank waits for the slowest: leave this node out",
            host,
        )
        for host, rate in rates.items()
        if rate < _SLOW * median
    ]


def _split(complaint: str) -> tuple[str, str]:
    what, _, mend = complaint.partition("; ")
    return what, mend or "mend that"


def _gib(number: float) -> str:
    return f"{number / GIB:.1f} GiB"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
