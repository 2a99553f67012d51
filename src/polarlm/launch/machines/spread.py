"""How many ranks on which hosts: exactly what was asked for, or an error with the numbers; never rounded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.allocation import Allocation, is_this_machine
from polarlm.launch.machines.devices import local_devices
from polarlm.launch.machines.hostlist import Host
from polarlm.launch.machines.sites import Site

__all__ = ["Request", "Spread", "count_devices", "spread"]


@dataclass(frozen=True)
class Request:
    """What a user asks of a launch; None leaves it to the allocation, the site and the machine."""

    nodes: int | None = None
    ranks_per_node: int | None = None
    ranks: int | None = None
    ranks_name: str = "--ranks"  # where the user said it, for messages
    devices_per_node: int | None = None
    launcher: str | None = None
    cpu_bind: str | None = None
    site: str | None = None
    hosts: str | None = None
    host_file: Path | None = None


@dataclass(frozen=True)
class Spread:
    """Hosts, each with its ranks as slots; why; and what should be pointed out."""

    hosts: tuple[Host, ...]
    why: str
    warnings: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Ranks in all."""
        return sum(host.slots for host in self.hosts)

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on every host; None where they differ."""
        counts = {host.slots for host in self.hosts}
        return counts.pop() if len(counts) == 1 else None


def count_devices(
    request: Request, allocation: Allocation, site: Site | None, environment: Mapping[str, str]
) -> tuple[int, str]:
    """(devices of a node, who says so): a flag, the scheduler, the driver where this is one of the nodes, the site.

    Raises:
        UserError: the flag's number cannot be.
    """
    if request.devices_per_node is not None:
        if request.devices_per_node < 0:
            raise UserError(f"--devices-per-node: {request.devices_per_node} cannot be; give 0 where there are none")
        return request.devices_per_node, "--devices-per-node"
    if allocation.devices_per_node is not None:
        return allocation.devices_per_node, f"{allocation.scheduler} says"
    is_node = any(map(is_this_machine, allocation.hosts))
    if is_node and (found := local_devices(environment)):
        return found, "found on this node"
    is_alone = is_node and allocation.scheduler is None and len(allocation.hosts) == 1
    if site and site.devices_per_node and not is_alone:  # the site's login nodes have none
        return site.devices_per_node, f"site {site.name} says"
    return 0, "none found" if is_node else "none known"


def spread(request: Request, allocation: Allocation, devices: int, devices_why: str) -> Spread:
    """Place the ranks.

    Raises:
        UserError: there are not as many hosts or devices as asked for, or the ranks do not come out even.
    """
    hosts, source = allocation.hosts, allocation.source
    if request.nodes is not None:
        if not 0 < request.nodes <= len(hosts):
            raise UserError(f"--nodes: {request.nodes} cannot be; {source} has {_count(len(hosts), 'host')}")
        hosts = hosts[: request.nodes]
    warnings = []
    if request.ranks_per_node is not None:
        _check_per_node(request.ranks_per_node, devices, devices_why)
        each, why = [request.ranks_per_node] * len(hosts), f"{request.ranks_per_node} a node: --ranks-per-node"
    elif allocation.slots_given and (allocation.scheduler is None or not devices):
        each = [host.slots for host in hosts]
        why = f"as many a host as {source} has room for"
        if len(set(each)) > 1:
            warnings.append(f"the hosts get different numbers of ranks: {_list(hosts)}; --ranks-per-node N evens them")
    elif devices:
        each, why = [devices] * len(hosts), f"{devices} a node, one for each device ({devices_why})"
        if len({host.slots for host in hosts}) > 1:
            warnings.append(f"{source} lists {_list(hosts)}; each host gets {devices} ranks all the same")
    else:
        each, why = [1] * len(hosts), f"1 a node: no device ({devices_why}), and nothing says more"
    placed = tuple(Host(host.name, count) for host, count in zip(hosts, each, strict=True))
    if request.ranks is not None:
        is_free = not (devices or allocation.slots_given or request.ranks_per_node)
        return _exactly(request, placed, is_free, tuple(warnings))
    return Spread(placed, why, tuple(warnings))


def _exactly(request: Request, room: tuple[Host, ...], is_free: bool, warnings: tuple[str, ...]) -> Spread:
    """That many ranks in all: over as few hosts as have room, or over all of them where room is not known."""
    ranks, total = request.ranks, sum(host.slots for host in room)
    assert ranks is not None
    if ranks < 1:
        raise UserError(f"--ranks: {ranks} cannot be; give at least 1")
    if ranks == total:
        return Spread(room, f"{ranks} in all, as asked for", warnings)
    if len({host.slots for host in room}) > 1:
        raise UserError(
            f"{request.ranks_name}: {ranks} is not the {total} that the hosts have room for ({_list(room)})"
        )
    per_node = room[0].slots
    if not is_free and ranks > total:
        raise UserError(
            f"{request.ranks_name}: {ranks} is more than {_count(len(room), 'node')} x {per_node} = {total}; "
            f"give at most {total}"
        )
    nodes = len(room)
    if request.nodes is None:
        nodes = min(ranks, len(room)) if is_free else -(-ranks // per_node)
    if ranks % nodes or (request.ranks_per_node and ranks != nodes * request.ranks_per_node):
        unit = request.ranks_per_node or nodes
        lower, upper = ranks // unit * unit, (ranks // unit + 1) * unit
        raise UserError(
            f"{request.ranks_name}: {ranks} cannot be spread evenly over {_count(nodes, 'node')} of {per_node}; "
            f"nearest: {f'{lower} or ' if lower else ''}{upper}"
        )
    placed = tuple(Host(host.name, ranks // nodes) for host in room[:nodes])
    if nodes < len(room):
        warnings += (f"{ranks} ranks take {nodes} of the {len(room)} hosts; the others stay idle",)
    return Spread(placed, f"{ranks} in all, as asked for: {ranks // nodes} on {_count(nodes, 'host')}", warnings)


def _check_per_node(ranks: int, devices: int, why: str) -> None:
    if ranks < 1 or (devices and ranks > devices):
        limit = f"at most the {devices} devices of a node ({why}); --devices-per-node says another number"
        raise UserError(f"--ranks-per-node: {ranks} cannot be; give {limit if devices else 'at least 1'}")


def _list(hosts: tuple[Host, ...]) -> str:
    return ", ".join(f"{host.name} {host.slots}" for host in hosts)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
