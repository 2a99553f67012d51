"""Which rank this process is, and how many accelerators this machine has, found without torch."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from polarlm.config import UserError

__all__ = ["FAMILIES", "Family", "Rank", "local_devices", "rank_from"]


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
    """The names under which one launcher tells a process its place."""

    launcher: str
    rank: str
    world: str
    local_rank: str
    local_world: str


# In order of precedence. The three numbers that place a process come from one family or from none: inside an allocation
# the variables of several stand side by side.
FAMILIES = (Family("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),)


def rank_from(environ: Mapping[str, str]) -> Rank | None:
    """Return the place the first complete family gives, or None when no launcher started this process.

    An empty variable is an unset one.

    Raises:
        UserError: a variable of that family is not a number, or its rank is not below its world.
    """
    for family in FAMILIES:
        if all(environ.get(name) for name in (family.rank, family.world, family.local_rank)):
            return _place(family, environ)
    return None


def _place(family: Family, environ: Mapping[str, str]) -> Rank:
    place = Rank(
        rank=_number(environ, family.rank),
        world=_number(environ, family.world),
        local_rank=_number(environ, family.local_rank),
        local_world=_number(environ, family.local_world) if environ.get(family.local_world) else None,
        master_addr=environ.get("MASTER_ADDR") or None,
        master_port=_number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None,
    )
    if place.rank >= place.world:
        raise UserError(
            f"{family.rank}={place.rank} must be below {family.world}={place.world}: unset both, or mend them"
        )
    return place


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise UserError(f"{name}={environ[name]!r} in the environment is not a whole number: unset it, or mend it")
    return int(environ[name])


def local_devices(environ: Mapping[str, str] = os.environ) -> int:
    """Count the accelerators a process of this machine will see; 0 when there are none.

    Raises:
        UserError: the driver's own program does not answer.
    """
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=60)
    except FileNotFoundError:
        return 0
    except subprocess.TimeoutExpired as error:
        raise UserError(
            "`nvidia-smi -L` gave no answer in 60 s: say the number of ranks with parallel.ranks"
        ) from error
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return _visible(environ.get("CUDA_VISIBLE_DEVICES"), present)


def _visible(chosen: str | None, present: int) -> int:
    """Apply CUDA_VISIBLE_DEVICES as the driver does: an empty list hides all, a wrong entry all from there on."""
    if chosen is None or not present:
        return present
    devices = [device.strip() for device in chosen.split(",")]
    wrong = (
        number
        for number, device in enumerate(devices)
        if not (device.startswith(("GPU-", "MIG-")) or (device.isdecimal() and int(device) < present))
    )
    return next(wrong, len(devices))
