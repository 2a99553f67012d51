"""The words each launcher takes to start the same ranks on the same hosts with the same environment.

Variables are set in the launcher's own environment and forwarded by name or as a whole, so that no value ever passes
through an option that would split it at a comma.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.spread import Spread

__all__ = ["BUILDERS", "FORWARDING", "Start", "forwarded_names", "host_file_text"]

# What is this host's, this shell's or this job step's own: no other host gets it.
_OWN = ("_", "HOST", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TEMP", "TMP", "TMPDIR")
_OWN_PREFIXES = (
    *("COBALT_", "DBUS_", "HYDRA_", "OMPI_", "PALS_", "PBS_", "PMI", "PRTE_", "SLURM", "SSH_"),
    *("XDG_RUNTIME", "XDG_SESSION"),
)

# How the environment of this process, with all that modules and a virtual environment have set, reaches each rank.
FORWARDING = {
    "local": "each rank inherits this environment whole",
    "torchrun": "each rank inherits this environment whole",
    "pals": "--envall gives each rank this environment whole",
    "mpich": "-genvall gives each rank this environment whole",
    "openmpi": "-x, since Open MPI gives none by itself, gives each rank all variables here but a host's own",
    "srun": "--export=ALL gives each rank this environment whole",
}


@dataclass(frozen=True)
class Start:
    """What is to be started."""

    program: str
    spread: Spread
    is_whole: bool  # every host of the scheduler's job takes part, so that they need not be named to it
    host_file: Path | None
    options: Sequence[str]  # the site's, and those that bind
    names: Sequence[str]  # variables that must reach the ranks
    is_root: bool


def _pals(start: Start) -> list[str]:
    per_node = _even(start, "PALS")
    words = [start.program, "-n", str(start.spread.world), "--ppn", str(per_node)]
    return [*words, "--hostfile", str(start.host_file), *start.options, "--envall"]


def _mpich(start: Start) -> list[str]:
    per_node = start.spread.ranks_per_node
    words = [start.program, "-n", str(start.spread.world), *(["--ppn", str(per_node)] if per_node else [])]
    return [*words, "-f", str(start.host_file), *start.options, "-genvall"]


def _openmpi(start: Start) -> list[str]:
    """Slots are counted by us, whatever the scheduler told Open MPI."""
    per_node = start.spread.ranks_per_node
    words = [start.program, *(["--allow-run-as-root"] if start.is_root else []), "-n", str(start.spread.world)]
    words += ["--hostfile", str(start.host_file)]
    words += ["--map-by", f"{f'ppr:{per_node}:node' if per_node else 'slot'}:OVERSUBSCRIBE"]
    return [*words, *start.options] + [word for name in start.names for word in ("-x", name)]


def _srun(start: Start) -> list[str]:
    per_node = _even(start, "srun")
    hosts = start.spread.hosts
    words = [start.program, f"--nodes={len(hosts)}", f"--ntasks={start.spread.world}", f"--ntasks-per-node={per_node}"]
    if not start.is_whole:
        words.append(f"--nodelist={','.join(host.address for host in hosts)}")
    return [*words, *start.options, "--kill-on-bad-exit=1", "--export=ALL"]


BUILDERS: dict[str, Callable[[Start], list[str]]] = {"pals": _pals, "mpich": _mpich, "openmpi": _openmpi, "srun": _srun}


def _even(start: Start, launcher: str) -> int:
    if start.spread.ranks_per_node is None:
        counts = ", ".join(f"{host.name} {host.slots}" for host in start.spread.hosts)
        raise UserError(
            f"--ranks-per-node: {launcher} starts as many ranks on each host, not {counts}; give one number"
        )
    return start.spread.ranks_per_node


def host_file_text(kind: str, spread: Spread) -> str | None:
    """The hosts as this launcher reads them; None for one that asks its scheduler."""
    forms = {"pals": "{name}", "mpich": "{name}:{slots}", "openmpi": "{name} slots={slots}"}
    if kind not in forms:
        return None
    return "".join(forms[kind].format(name=host.name, slots=host.slots) + "\n" for host in spread.hosts)


def forwarded_names(names: Iterable[str]) -> list[str]:
    """Which of these variables Open MPI is told to forward: any that a module may have set.

    What a module has set is not to be known: it may be called anything, and `LOADEDMODULES` tells only its name. So all
    go, as with every other launcher; only shells' functions, whose names no variable has, stay behind.
    """
    return sorted(
        name
        for name in names
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) and name not in _OWN and not name.startswith(_OWN_PREFIXES)
    )
