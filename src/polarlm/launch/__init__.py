"""Where a run's processes start and where its files lie. No torch, no MPI: it must work wherever Python does.

`run_local` starts the ranks of one machine and ends them all; `rank_from` reads the place a launcher gave this process;
`run_folder` holds the folder of a run, `lock` keeps a second job out of it. `job_script` is what a scheduler is handed,
and `job` what that script runs. Importing it asks nothing of the machine.
"""

from polarlm.launch import lock, run_folder
from polarlm.launch.allocation import Allocation, find_allocation
from polarlm.launch.describe import describe
from polarlm.launch.devices import local_devices
from polarlm.launch.distribution import Distribution, Outcome
from polarlm.launch.environments import create as create_environment
from polarlm.launch.environments import describe_plan, plan_environment
from polarlm.launch.facts import Folder, NodeFacts, cause_of, gather_facts, look_at_folder
from polarlm.launch.findings import Finding, clocks, examine, exchange_of, folder, report, same_everywhere
from polarlm.launch.hosts import short_host_name, short_name
from polarlm.launch.job_script import job_script
from polarlm.launch.job_table import job_table
from polarlm.launch.jobs import write_job_event
from polarlm.launch.lead import lead_time
from polarlm.launch.local import LISTEN_FD, check_environment, run_local
from polarlm.launch.logs import follow, rank_logs, tail
from polarlm.launch.meeting import meet
from polarlm.launch.nodes import on_every_node, why_silent
from polarlm.launch.prepare import Launch, available_ranks, prepare
from polarlm.launch.ranks import Rank, rank_from
from polarlm.launch.remote import run
from polarlm.launch.schedulers import BATCH_SCHEDULERS, BatchScheduler, Wanted
from polarlm.launch.sites import Site, known_sites, recognise, site_named
from polarlm.launch.spread import Request
from polarlm.launch.wire import WireError

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
    "available_ranks",
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
