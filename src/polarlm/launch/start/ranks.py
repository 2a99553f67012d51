"""Which rank this process is, told by whoever launched it: by one launcher's variables, never by several mixed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polarlm.config import UserError
from polarlm.launch.machines.hostlist import expand_tasks

__all__ = ["FAMILIES", "PLACE_NAMES", "WORLD_SIZE", "Family", "Rank", "rank_from"]

# Set by `polarlm launch` for launchers that tell a rank its number but not how many there are.
WORLD_SIZE = "POLARLM_WORLD_SIZE"


@dataclass(frozen=True)
class Rank:
    """One process's place among all; None where its launcher did not say."""

    rank: int
    world: int
    local_rank: int
    local_world: int | None
    master_addr: str | None
    master_port: int | None


@dataclass(frozen=True)
class Family:
    """The names under which one launcher tells a process its place; of several names, the first that is set counts."""

    launcher: str
    rank: str
    world: tuple[str, ...]
    local_rank: str
    local_world: str


# In order of precedence. The three numbers that place a process come from one family or from none: inside an allocation
# the variables of several stand side by side. PALS with PMIx says no world size; Slurm's is in `_slurm`.
FAMILIES = (
    Family("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Family(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Family("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Family("PALS with PMI", "PMI_RANK", ("PMI_SIZE",), "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    Family("PALS", "PALS_RANKID", ("PMI_SIZE", WORLD_SIZE), "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    Family("MVAPICH2", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK", "MV2_LOCAL_SIZE"),
)
_SLURM = Family("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_LOCALID", "")

# Every name above that a launcher sets for each rank anew; one that is left from before would count in its stead.
PLACE_NAMES = tuple(
    dict.fromkeys(
        name
        for family in FAMILIES
        for name in (family.rank, *family.world, family.local_rank, family.local_world)
        if name != WORLD_SIZE
    )
)


def rank_from(environ: Mapping[str, str]) -> Rank | None:
    """Return the place the first complete family gives, or None when no launcher started this process.

    torchrun's set counts before an MPI's, an MPI's before the Slurm step's that it may run in. A batch script is no
    step, though Slurm gives it a number. An empty variable is an unset one.

    Raises:
        UserError: a variable of that family is not a number, or its rank is not below its world.
    """
    for family in FAMILIES:
        if (world := _first(environ, family.world)) and environ.get(family.rank) and environ.get(family.local_rank):
            return _place(environ, family, world, _number(environ, world))
    return _from_slurm(environ)


def _from_slurm(environ: Mapping[str, str]) -> Rank | None:
    if not (environ.get("SLURM_PROCID") and environ.get("SLURM_LOCALID")):
        return None
    in_step = _first(environ, ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"))
    if not in_step and _number(environ, "SLURM_PROCID") == 0:
        return None
    world_name = _first(environ, _SLURM.world)
    if world_name:
        place = _place(environ, _SLURM, world_name, _number(environ, world_name))
    else:
        world_name = "nodes x SLURM_NTASKS_PER_NODE"
        nodes = _first(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"))
        if not (nodes and environ.get("SLURM_NTASKS_PER_NODE")):
            return None
        tasks = _number(environ, nodes) * _number(environ, "SLURM_NTASKS_PER_NODE")
        place = _place(environ, _SLURM, world_name, tasks)
    return replace(place, local_world=_slurm_local_world(environ))


def _slurm_local_world(environ: Mapping[str, str]) -> int | None:
    name = _first(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if not (name and environ.get("SLURM_NODEID")):
        return None
    counts, node = expand_tasks(environ[name], name), _number(environ, "SLURM_NODEID")
    return counts[node] if node < len(counts) else None


def _place(environ: Mapping[str, str], family: Family, world_name: str, world: int) -> Rank:
    local_world = family.local_world if environ.get(family.local_world) else None
    place = Rank(
        rank=_number(environ, family.rank),
        world=world,
        local_rank=_number(environ, family.local_rank),
        local_world=_number(environ, local_world) if local_world else None,
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None,
    )
    if place.rank >= place.world:
        raise UserError(
            f"{family.rank}={place.rank} must be below {world_name}={place.world}: unset both, or mend them"
        )
    return place


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", environ[name]):
        raise UserError(f"{name}={environ[name]!r} in the environment is not a whole number: unset it, or mend it")
    return int(environ[name])
