"""Where ranks meet that no one told an address or a port: worked out by each, alike."""

import os
from collections.abc import Mapping
from dataclasses import replace

from polarlm.config import UserError
from polarlm.launch.machines.hostlist import expand_nodelist
from polarlm.launch.machines.network import FIRST_PORT, PORTS, port_of_job
from polarlm.launch.start.ranks import Rank

__all__ = ["meet"]


def meet(place: Rank, environment: Mapping[str, str]) -> Rank:
    """The same place, with an address and a port; those that it has are kept.

    `polarlm launch` says both. Ranks that someone started with a bare `srun` take the first host of the step and a port
    from the job's and the step's number; ranks of one machine this machine, and a port from the number of their common
    parent process.

    Raises:
        UserError: ranks of several machines, and nothing says where they meet.
    """
    if place.world == 1 or (place.master_addr and place.master_port):
        return place
    address, port = place.master_addr, place.master_port
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job_id, in_step = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_ID")
    if place.local_world == place.world:
        port = port or FIRST_PORT + os.getppid() % PORTS
        address = address or "127.0.0.1"
    elif nodes and job_id and in_step:
        address = address or expand_nodelist(nodes)[0]
        port = port or port_of_job(f"{job_id}[{in_step}]")
    else:
        raise UserError(
            f"{'MASTER_PORT' if address else 'MASTER_ADDR'} is not set, and these {place.world} ranks are on several "
            "machines: start them with `polarlm launch`, or set MASTER_ADDR and MASTER_PORT for all of them"
        )
    return replace(place, master_addr=address, master_port=port)
