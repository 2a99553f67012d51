"""Where a run's processes start and where its files lie. No torch, no MPI: it must work wherever Python does.

`run_local` starts the ranks of one machine and ends them all; `rank_from` reads the place a launcher gave this process;
`run_folder` holds the folder of a run, `lock` keeps a second job out of it. Importing it asks nothing of the machine.
"""

from polarlm.launch import lock, run_folder
from polarlm.launch.allocation import Allocation, find_allocation
from polarlm.launch.describe import describe
from polarlm.launch.devices import local_devices
from polarlm.launch.hosts import short_host_name, short_name
from polarlm.launch.local import LISTEN_FD, check_environment, run_local
from polarlm.launch.meeting import meet
from polarlm.launch.prepare import Launch, available_ranks, prepare
from polarlm.launch.ranks import Rank, rank_from
from polarlm.launch.remote import run
from polarlm.launch.sites import Site, known_sites, recognise, site_named
from polarlm.launch.spread import Request

__all__ = [
    "LISTEN_FD",
    "Allocation",
    "Launch",
    "Rank",
    "Request",
    "Site",
    "available_ranks",
    "check_environment",
    "describe",
    "find_allocation",
    "known_sites",
    "local_devices",
    "lock",
    "meet",
    "prepare",
    "rank_from",
    "recognise",
    "run",
    "run_folder",
    "run_local",
    "short_host_name",
    "short_name",
    "site_named",
]
