"""Look at this machine, or at every node of the job this stands in: what is right, what is wrong, and how to mend it.

polarlm doctor                  aligned lines: ok, warning or fault; what; its mend
polarlm doctor --json           the same as a JSON list
polarlm doctor --hosts a,b      these machines

The exit code is 0 when there is no fault, else 1.
"""

import argparse
import json
import os
import sys
import tempfile
import time
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
    is_here_alone = allocation.is_here and (len(allocation.hosts) == 1 or arguments.nodes == 1)
    findings = _here(allocation.scheduler) if is_here_alone else _on_nodes(request, allocation.scheduler)
    print(json.dumps([asdict(each) for each in findings], indent=2) if arguments.json else report(findings))
    return int(any(each.status == "fault" for each in findings))


def _here(scheduler: str | None) -> "list[Finding]":
    from polarlm.launch import examine, gather_facts

    return examine([gather_facts(_folders(), _probe(), os.environ)], scheduler, {})


def _on_nodes(request: "Request", scheduler: str | None) -> "list[Finding]":
    from polarlm.launch import Finding, NodeFacts, WireError, examine, on_every_node

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
        hosts, code = on_every_node(
            "polarlm.launch.node_facts", words, request, os.environ, Path(name) / "logs", lambda hosts: attend
        )
    absent = [
        Finding(
            "fault",
            "launch",
            f"says nothing; the launcher ended with code {code}",
            "look at the launcher's own words above, or leave this node out",
            host,
        )
        for host in hosts
        if host not in facts
    ]
    return absent + examine([facts[host] for host in hosts if host in facts], scheduler, ahead_s)


def _folders() -> dict[str, Path]:
    return {"runs": _RUNS.absolute(), "temporary": Path(tempfile.gettempdir())}


def _probe() -> list[str]:
    return [sys.executable, "-m", "polarlm.cli.probe"]
