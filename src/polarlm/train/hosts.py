"""Whether the hosts of a run go together, found out where its ranks meet and before they do anything."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

import polarlm
from polarlm.config import RunConfig, UserError
from polarlm.launch import Finding, Folder, clocks, folder, look_at_folder, same_everywhere, short_host_name
from polarlm.parallel import World
from polarlm.plan import count_parameters

__all__ = ["check_hosts"]

_LEAST_BYTES, _FULL_BYTES = 4, 12  # a parameter's share of a checkpoint: its weight; and the two moments of AdamW


@dataclass(frozen=True)
class _Host:
    """What one host brings to the meeting; its time is read when all are there."""

    name: str
    clock_s: float
    polarlm: str
    torch: str
    folder: Folder


def check_hosts(run_folder: Path, config: RunConfig, world: World) -> None:
    """Compare versions and clocks, and see that each host can write checkpoints; every rank calls, and every one stops.

    Raises:
        UserError: a host has another version, or cannot write; by name.
    """
    name = short_host_name()
    is_hosts_first = world.gather(name).index(name) == world.rank
    looked = look_at_folder("checkpoints", run_folder / "checkpoints") if is_hosts_first else None
    world.barrier()
    own = looked and _Host(name, time.time(), polarlm.__version__, str(torch.__version__), looked)
    hosts = [host for host in world.gather(own) if host]
    for finding in _judge(hosts, config):
        where = f"{finding.host}: " if finding.host else ""
        if finding.status == "fault":
            mend = "mend that, and go on with --resume" if finding.topic == "checkpoints" else finding.mend
            raise UserError(f"{where}{finding.what}; {mend}")
        if finding.status == "warning" and world.is_first:
            print(f"warning: {where}{finding.what}; {finding.mend}", flush=True)


def _judge(hosts: list[_Host], config: RunConfig) -> list[Finding]:
    parameters, kept = count_parameters(config.model), config.checkpoint.keep_last + 1
    sizes = _LEAST_BYTES * parameters, _FULL_BYTES * parameters * kept
    found = [folder(host.folder, *sizes) for host in hosts]
    if len(hosts) > 1:
        found = [
            Finding(each.status, each.topic, each.what, each.mend, host.name)
            for each, host in zip(found, hosts, strict=True)
        ]
        found += same_everywhere("polarlm", {host.name: host.polarlm for host in hosts})
        found += same_everywhere("torch", {host.name: host.torch for host in hosts})
        found += clocks({host.name: host.clock_s for host in hosts})
    return found
