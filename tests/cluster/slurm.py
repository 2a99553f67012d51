"""A real Slurm in the room: its controller on the login machine, and a daemon on each node."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.room import ADDRESSES, LOGIN, LOGIN_ADDRESS, NODES, Room

# Jobs end fast here (KillWait), nothing is accounted, and the cores are said, not found out.
_CONFIGURATION = f"""
ClusterName=room
SlurmctldHost={LOGIN}({LOGIN_ADDRESS})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=FOLDER/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
MpiDefault=none
ReturnToService=0
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
StateSaveLocation=FOLDER/state
SlurmctldLogFile=FOLDER/slurmctld.log
SlurmctldPidFile=FOLDER/slurmctld.pid
SlurmdPidFile=FOLDER/slurmd.%n.pid
SlurmdSpoolDir=FOLDER/spool.%n
SlurmdLogFile=FOLDER/slurmd.%n.log
SlurmdParameters=config_overrides
{"".join(f"NodeName={name} NodeAddr={ADDRESSES[name]} CPUs=2 RealMemory=4000{chr(10)}" for name in NODES)}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_PATIENCE_S = 30
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


class Slurm:
    """A Slurm that has started, and ends with its room."""

    def __init__(self, room: Room) -> None:
        self.room = room
        folder = room.folder
        (folder / "slurm.conf").write_text(_CONFIGURATION.replace("FOLDER", str(folder)))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        munge = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
        self.run("munged", f"--key-file={key}", *(f"--{name}={folder / file}" for name, file in munge.items()))
        self.run("slurmctld")
        for node in NODES:
            self.run("slurmd", node=node)
        self.wait_until_idle()

    def run(self, *words: object, node: str = LOGIN, folder: Path | None = None, timeout: float = 60) -> str:
        """Run a program that must succeed on a machine of the room, and return its output."""
        result = self.try_run(*words, node=node, folder=folder, timeout=timeout)
        assert result.returncode == 0, f"{words[0]}: {result.stdout}{result.stderr}"
        return result.stdout

    def try_run(self, *words: object, node: str = LOGIN, folder: Path | None = None, timeout: float = 60):
        """Run a program that may fail."""
        return self.room.run(*words, node=node, folder=folder, environment=self.environment, timeout=timeout)

    def submit(self, script: Path, *options: str) -> "Job":
        """Hand a job in, from the script's folder."""
        number = self.run("sbatch", "--parsable", *options, script.name, folder=script.parent)
        return Job(self, int(number))

    def resume(self, node: str) -> None:
        """Give a node that was taken down back."""
        self.run("scontrol", "update", f"nodename={node}", "state=resume")
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Return when every node is ready for a job."""
        deadline = time.monotonic() + _PATIENCE_S
        while (states := self.run("sinfo", "--noheader", "--Node", "--format=%T").split()) != ["idle"] * len(NODES):
            assert time.monotonic() < deadline, f"the nodes are {states}"
            time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """A job that has been handed in."""

    slurm: Slurm
    number: int

    def field(self, name: str) -> str:
        """What `scontrol show job` says under that name."""
        shown = self.slurm.run("scontrol", "--oneliner", "show", "job", self.number)
        match = re.search(rf"(?:^| ){name}=(\S*)", shown)
        assert match, shown
        return match[1]

    def nodes(self) -> list[str]:
        """The nodes it runs on, or ran on last."""
        return self.slurm.run("scontrol", "show", "hostnames", self.field("NodeList")).split()

    def start_now(self) -> None:
        """Let it start, once it is waiting and its nodes have forgotten it: Slurm holds it back for two minutes."""
        deadline = time.monotonic() + _PATIENCE_S
        spooled = f"spool.*/job{self.number:05d}*"
        while (state := self.field("JobState")) != "PENDING" or any(self.slurm.room.folder.glob(spooled)):
            assert time.monotonic() < deadline, f"job {self.number} is {state}"
            time.sleep(0.2)
        time.sleep(2)  # a node refuses a job that starts in the very second in which it last ended there
        self.slurm.run("scontrol", "update", f"jobid={self.number}", "starttime=now")

    def wait(self, timeout: float = 300) -> str:
        """Return its state once it has ended."""
        deadline = time.monotonic() + timeout
        while (state := self.field("JobState")) not in _ENDED:
            assert time.monotonic() < deadline, f"job {self.number} is {state}"
            time.sleep(0.2)
        return state
