"""What one machine is like, gathered and not judged (`findings.py` judges): without torch, which a process of its own
is asked about, so that a broken one is a fact like any other."""

import contextlib
import io
import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polarlm
from polarlm.config import UserError
from polarlm.launch.machines.devices import local_devices
from polarlm.launch.machines.hosts import short_host_name
from polarlm.launch.machines.mpi import find_mpi
from polarlm.launch.start.local import run_local

__all__ = ["Folder", "NodeFacts", "cause_of", "gather_facts", "look_at_folder"]

# The makers' programs, and how each says its driver's version.
_DRIVERS = {
    "NVIDIA": ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "AMD": ("rocm-smi", "--showdriverversion", "--csv"),
    "Intel": ("xpu-smi", "-v"),
}
_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "qsub", "qstat", "qdel")
# The two ranks of the probe meet on their own machine, whatever the ranks of the job are told.
_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to.

    Attributes:
        purpose: in a word.
        complaint: why it cannot be written, or nothing.
        free_bytes: on its file system, for us.
    """

    purpose: str
    path: str
    complaint: str
    free_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """One machine. Texts are empty and numbers 0 where there is nothing; complaints are why there is nothing.

    Attributes:
        full_name: what `socket.getfqdn()` says.
        own_addresses: what its own name resolves to.
        maker, driver, devices: of accelerators, as the maker's own program says.
        torch, built_for, torch_devices: torch's version, `CUDA 12.6`, `ROCm 6.2`, `XPU` or nothing, and what it sees.
        exchange_on: what the two ranks of the probe exchanged over, such as `gloo, cpu`.
        exchange_bytes_per_s: sent by each of the two.
        commands: a scheduler's, on the PATH.
        sees: of the files that the head wrote for all nodes, whether it is here.
    """

    host: str
    full_name: str
    own_addresses: tuple[str, ...]
    python: str
    executable: str
    polarlm: str
    maker: str = ""
    driver: str = ""
    devices: int = 0
    devices_complaint: str = ""
    torch: str = ""
    built_for: str = ""
    torch_devices: int = 0
    torch_complaint: str = ""
    exchange_on: str = ""
    exchange_bytes_per_s: float = 0.0
    exchange_complaint: str = ""
    mpi: str = ""
    mpi_complaint: str = ""
    commands: tuple[str, ...] = ()
    folders: tuple[Folder, ...] = ()
    sees: bool = True

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> "NodeFacts":
        """The facts as `json.dumps(asdict(facts))` wrote them."""
        folders = tuple(Folder(**folder) for folder in record["folders"])
        return NodeFacts(**{**record, "folders": folders})


def gather_facts(
    folders: Mapping[str, Path], probe: Sequence[str], environment: Mapping[str, str], sign: Path | None = None
) -> NodeFacts:
    """Look at this machine; seconds, mostly torch's start in two processes.

    Args:
        folders: where runs write, by purpose.
        probe: the command of one of two ranks that ask torch and exchange something; it gets a folder to answer in.
        sign: a file that should be here too.
    """
    maker, driver = _driver()
    devices, devices_complaint = 0, ""
    try:
        devices = local_devices(environment)
    except UserError as error:
        devices_complaint = str(error)
    mpi, mpi_complaint = _mpi()
    return NodeFacts(
        host=short_host_name(),
        full_name=socket.getfqdn(),
        own_addresses=_own_addresses(),
        python=platform.python_version(),
        executable=sys.executable,
        polarlm=polarlm.__version__,
        maker=maker,
        driver=driver,
        devices=devices,
        devices_complaint=devices_complaint,
        mpi=mpi,
        mpi_complaint=mpi_complaint,
        commands=tuple(name for name in _COMMANDS if shutil.which(name)),
        folders=tuple(look_at_folder(purpose, path) for purpose, path in folders.items()),
        sees=sign is None or sign.exists(),
        **_ask_torch(probe, environment),
    )


def look_at_folder(purpose: str, path: Path) -> Folder:
    """Make a small folder with a small file there, or where the folder itself would be made."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    complaint = ""
    try:
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=there) as trial:
            (Path(trial) / "file").write_bytes(b"\0" * 4096)
    except OSError as error:
        complaint = error.strerror or str(error)
    return Folder(purpose, str(path), complaint, shutil.disk_usage(there).free)


def _own_addresses() -> tuple[str, ...]:
    try:
        return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}))
    except OSError:
        return ()


def _driver() -> tuple[str, str]:
    """(maker, the driver's version) of the first maker whose program is here and says one."""
    for maker, command in _DRIVERS.items():
        try:
            answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = answer.stdout.split("\n")
        if answer.returncode == 0 and lines[0].strip():
            return maker, lines[0].strip()
    return "", ""


def _mpi() -> tuple[str, str]:
    try:
        program = find_mpi()
    except UserError as error:
        return "", str(error)
    return (f"{program.kind} {program.version} ({program.path})", "") if program else ("", "")


def _ask_torch(probe: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """What two ranks of this machine find out about torch and each other, as far as they get."""
    own = {name: value for name, value in environment.items() if name not in _OF_THE_JOB}
    try:
        room = tempfile.TemporaryDirectory(prefix="polarlm-probe-")
    except OSError as error:
        return {"torch_complaint": f"not tried, for want of a folder ({error.strerror})"}
    with room as name:
        folder, said = Path(name), io.StringIO()
        with contextlib.redirect_stderr(said):  # what the watcher over the ranks would tell a user
            code = run_local([*probe, name], 2, folder / "logs", own)
        found = {}
        for answer in sorted(folder.glob("*.json")):
            found |= json.loads(answer.read_text(encoding="utf-8"))
        if code:
            failed = "exchange_complaint" if "torch" in found else "torch_complaint"
            found[failed] = cause_of(said.getvalue().replace(name, "..."), code)
    return found


def cause_of(said: str, code: int) -> str:
    """Of what a launch said as it failed, the line that names the exception, else the watcher's own words."""
    words = said.strip().splitlines()
    causes = [line for line in words if line.strip() and not line.startswith((" ", "error: rank"))]
    return (causes or words or [f"ended with code {code}"])[-1].removeprefix("error: ").strip()[:200]
