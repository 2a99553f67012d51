"""Where a run's processes start and where its files lie. No torch, no MPI: it must work wherever Python does.

`machines` knows hosts, devices and sites; `start` goes from a request to running ranks and their end; `jobs` is what
PBS and Slurm are handed, and its record; `nodes` asks every node how it is, and brings environments there. Here lie
`run_folder`, `lock` and `logs`, which are a run's, and the programs that are started by name: `enter` between a
launcher and a rank, `job` in a job script, `node_facts` and `stage_node` on each node, `guard` beside a launcher.
Importing it asks nothing of the machine.
"""

from typing import TYPE_CHECKING

from polarlm.config.later import later
from polarlm.launch import lock, run_folder
from polarlm.launch.machines.allocation import Allocation, find_allocation
from polarlm.launch.machines.devices import local_devices
from polarlm.launch.machines.hosts import short_host_name, short_name
from polarlm.launch.machines.sites import Site, known_sites, recognise, site_named
from polarlm.launch.machines.spread import Request
from polarlm.launch.start.describe import describe
from polarlm.launch.start.local import LISTEN_FD, check_environment, run_local
from polarlm.launch.start.meeting import meet
from polarlm.launch.start.prepare import Launch, available_spread, prepare
from polarlm.launch.start.ranks import Rank, rank_from
from polarlm.launch.start.remote import run

if TYPE_CHECKING:
    from polarlm.launch.jobs.job_script import job_script
    from polarlm.launch.jobs.job_table import job_table
    from polarlm.launch.jobs.lead import lead_time
    from polarlm.launch.jobs.record import write_job_event
    from polarlm.launch.jobs.schedulers import BATCH_SCHEDULERS, BatchScheduler, Wanted
    from polarlm.launch.logs import follow, rank_logs, tail
    from polarlm.launch.nodes.call import on_every_node, why_silent
    from polarlm.launch.nodes.distribution import Distribution, Outcome
    from polarlm.launch.nodes.environments import create_environment, describe_plan, plan_environment
    from polarlm.launch.nodes.facts import Folder, NodeFacts, cause_of, gather_facts, look_at_folder
    from polarlm.launch.nodes.findings import Finding, clocks, examine, exchange_of, folder, report, same_everywhere
    from polarlm.launch.nodes.wire import WireError
else:
    # Whoever starts a rank needs none of these.
    __getattr__ = later(
        __name__,
        {
            "jobs.job_script": "job_script",
            "jobs.job_table": "job_table",
            "jobs.lead": "lead_time",
            "jobs.record": "write_job_event",
            "jobs.schedulers": "BATCH_SCHEDULERS BatchScheduler Wanted",
            "logs": "follow rank_logs tail",
            "nodes.call": "on_every_node why_silent",
            "nodes.distribution": "Distribution Outcome",
            "nodes.environments": "create_environment describe_plan plan_environment",
            "nodes.facts": "Folder NodeFacts cause_of gather_facts look_at_folder",
            "nodes.findings": "Finding clocks examine exchange_of folder report same_everywhere",
            "nodes.wire": "WireError",
        },
    )

__all__ = [
    "BATCH_SCHEDULERS",
    "LISTEN_FD",
    "Allocation",
    "BatchScheduler",
    "Distribution",
    "Finding",
    "Folder",
    "Launch",
    "NodeFacts",
    "Outcome",
    "Rank",
    "Request",
    "Site",
    "Wanted",
    "WireError",
    "available_spread",
    "cause_of",
    "check_environment",
    "clocks",
    "create_environment",
    "describe",
    "describe_plan",
    "examine",
    "exchange_of",
    "find_allocation",
    "folder",
    "follow",
    "gather_facts",
    "job_script",
    "job_table",
    "known_sites",
    "lead_time",
    "local_devices",
    "lock",
    "look_at_folder",
    "meet",
    "on_every_node",
    "plan_environment",
    "prepare",
    "rank_from",
    "rank_logs",
    "recognise",
    "report",
    "run",
    "run_folder",
    "run_local",
    "same_everywhere",
    "short_host_name",
    "short_name",
    "site_named",
    "tail",
    "why_silent",
    "write_job_event",
]
