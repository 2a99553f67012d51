"""One process on each node of a job, and the one here that all of them call: for what is asked of nodes, not of ranks.

The process here (the head) listens; the launcher starts `python -m MODULE ...` once on every host, and each of these
calls the head back. A host whose process never calls is known by its absence.
"""

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polarlm.launch.machines.hosts import short_host_name, short_name
from polarlm.launch.machines.network import own_address_towards
from polarlm.launch.machines.spread import Request
from polarlm.launch.nodes.wire import Gate, Wire, WireError, connect
from polarlm.launch.start.prepare import Launch, prepare
from polarlm.launch.start.ranks import rank_from
from polarlm.launch.start.remote import run

__all__ = ["call_head", "on_every_node", "why_silent"]

HEAD, KEY = "POLARLM_HEAD", "POLARLM_KEY"

Attend = Callable[[str, dict[str, Any], Wire], None]


def on_every_node(
    module: str,
    words: list[str],
    request: Request,
    environment: Mapping[str, str],
    logs: Path,
    begin: Callable[[list[str]], Attend],
) -> tuple[list[str], int]:
    """Run a module once on every host, and hear what each says.

    Args:
        module, words: `python -m module words...`, whose first act is `call_head`.
        logs: a folder that all hosts share.
        begin: called with the hosts' names before anything starts; what it gives is called for each host, in a thread,
            with (its name in the list of hosts, what it said first, the wire).

    Returns:
        the hosts' names, and the launcher's exit code.

    Raises:
        UserError: as `prepare`.
    """
    command = [sys.executable, "-m", module, *words]
    request = replace(request, ranks_per_node=1)
    key = secrets.token_bytes(32)
    placed = prepare(command, request, environment, logs, each_alone=True)
    names = _names(placed)
    attend = begin(names)
    with Gate(key, lambda wire: _attend(wire, names, attend)) as gate:
        addresses = [host.address for host in placed.spread.hosts]
        whole = {**environment, HEAD: f"{own_address_towards(addresses)}:{gate.port}", KEY: key.hex()}
        # Once more, for the launchers that forward a variable only when they are told its name.
        return names, run(prepare(command, request, whole, logs, each_alone=True), logs, whole)


def why_silent(host: str, logs: Path, code: int) -> str:
    """What there is to say of a host that did not call, or broke off: the end of its log, else the launcher's code."""
    lines = [
        line for log in sorted(logs.glob(f"{host}.*.log")) for line in log.read_text(errors="replace").splitlines()
    ]
    said = [line.strip() for line in lines if line.strip()]
    return f"its log ends `{said[-1]}`" if said else f"nothing is heard of it; the launcher ended with code {code}"


def call_head(about: dict[str, Any]) -> Wire:
    """Call the process that started this one.

    Args:
        about: what to say first.

    Raises:
        WireError: it cannot be reached.
    """
    host, _, port = os.environ[HEAD].rpartition(":")
    wire = connect(host, int(port), bytes.fromhex(os.environ[KEY]))
    place = rank_from(os.environ)
    wire.send({"host": short_host_name(), "rank": place.rank if place else 0, **about})
    return wire


def _attend(wire: Wire, names: list[str], attend: Attend) -> None:
    try:
        first = wire.receive()
    except WireError:  # gone before it said who it is
        return
    own = short_name(first.pop("host"))
    rank = first.pop("rank")
    attend(own if own in names else names[rank], first, wire)


def _names(launch: Launch) -> list[str]:
    """The hosts' short names; an address of this machine and `localhost` stand for its own."""
    if launch.kind == "local":
        return [short_host_name()]
    return [short_name(host.address) for host in launch.spread.hosts]
