"""Look at this machine, or at every node of the job this stands in: what is right, what is wrong, and how to mend it.

polarlm doctor                  aligned lines: ok, warning or fault; what; its mend
polarlm doctor --json           the same as a JSON list
polarlm doctor --hosts a,b      these machines

The exit code is 0 when there is no fault, else 1.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.launch import Finding, Request

_RUNS = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where to look, and how to say it."""
    parser.add_argument("--json", action="store_true", help="a JSON list instead of lines")
    parser.add_argument("--nodes", type=int, metavar="N", help="the first N hosts of the job; by default all")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, a name a line")
    parser.add_argument("--hosts", metavar="A,B", help="hosts, `a,b`")


def run(arguments: argparse.Namespace) -> int:
    """Look, judge, and tell; 1 where there is a fault."""
    from dataclasses import asdict

    from polarlm.launch import Request, find_allocation, report

    request = Request(nodes=arguments.nodes, hosts=arguments.hosts, host_file=arguments.hostfile)
    allocation = find_allocation(os.environ, request.hosts, request.host_file)
    is_here_alone = allocation.is_here and (len(allocation.hosts) if arguments.nodes is None else arguments.nodes) == 1
    findings = _here(allocation.scheduler) if is_here_alone else _on_nodes(request, allocation.scheduler)
    print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.status == "fault" for each in findings))


def _here(scheduler: str | None) -> "list[Finding]":
    from polarlm.launch import examine, gather_facts

    return examine([gather_facts(_folders(), _probe(), os.environ)], scheduler, {})


def _on_nodes(request: "Request", scheduler: str | None) -> "list[Finding]":
    from polarlm.launch import Finding, NodeFacts, WireError, examine, on_every_node, why_silent

    facts: dict[str, NodeFacts] = {}
    ahead_s: dict[str, float] = {}

    def attend(host, first, wire):
        ahead_s[host] = first["clock"] - time.time()
        try:
            facts[host] = NodeFacts.from_json({**wire.receive(None), "host": host})
        except WireError:
            del ahead_s[host]  # it started and broke off: as absent as one that never called

    with tempfile.TemporaryDirectory(prefix=".polarlm-doctor-", dir=Path.cwd()) as name:
        sign = Path(name) / "sign"
        sign.touch()
        words = ["--sign", str(sign), *(f"{purpose}={path}" for purpose, path in _folders().items()), "--", *_probe()]
        logs = Path(name) / "logs"
        hosts, code = on_every_node("polarlm.launch.node_facts", words, request, os.environ, logs, lambda hosts: attend)
        mend = "leave this node out, or have the site look at it"
        found = [
            Finding("fault", "launch", why_silent(host, logs, code), mend, host) for host in hosts if host not in facts
        ]
        is_whole = not found and all(node.exchange_bytes_per_s for node in facts.values())
        found += examine([facts[host] for host in hosts if host in facts], scheduler, ahead_s)
        # With a node that is amiss, the rest would wait for it.
        return [*found, _between_nodes(request, Path(name) / "between")] if is_whole else found


def _between_nodes(request: "Request", folder: Path) -> "Finding":
    """One rank of each node in an all-reduce, started as those of a run are."""
    from polarlm.launch import cause_of, exchange_of, prepare
    from polarlm.launch import run as run_launch

    folder.mkdir()
    launch = prepare([*_probe(), str(folder)], replace(request, ranks_per_node=1), os.environ, folder / "logs")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run_launch(launch, folder / "logs", os.environ)
    whom = f"one rank on each of {len(launch.spread.hosts)} nodes"
    if code:
        return exchange_of(whom, 0.0, "", cause_of(said.getvalue().replace(str(folder), "..."), code))
    found = json.loads((folder / "exchange.json").read_text(encoding="utf-8"))
    return exchange_of(whom, found["exchange_bytes_per_s"], found["exchange_on"], "")


def _folders() -> dict[str, Path]:
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere, as on a full disk: then its usual place is a finding
        temporary = os.environ.get("TMPDIR") or "/tmp"
    return {"runs": _RUNS.absolute(), "temporary": Path(temporary)}


def _probe() -> list[str]:
    return [sys.executable, "-m", "polarlm.cli.probe"]
