"""Make a Python environment on top of the site's own, and copy it to the nodes of a job.

polarlm env create                  venvs/<machine>/<date>, with the site's torch, never another
polarlm env create --dry-run        show the commands, and run none
polarlm env stage venvs/polaris/2026-12-01 --to /local/scratch/env
                                    to the local storage of every node of the job this stands in

A staged environment is used by its own path: `/local/scratch/env/bin/polarlm train run.yaml` runs every rank from its
node's copy.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="create | stage")

    create = verbs.add_parser("create", help="a new environment on top of the Python that runs this")
    create.add_argument("--dry-run", action="store_true", help="show the commands, and run none")
    create.add_argument("--python", type=Path, metavar="FILE", help="another Python to stand on")
    create.add_argument("--folder", type=Path, default=Path("venvs"), help="where <machine>/<date> goes (venvs)")
    create.add_argument("--package", metavar="SPEC", help="what pip installs; by default this PolarLM")

    stage = verbs.add_parser("stage", help="copy an environment to every node of a job")
    stage.add_argument("environment", type=Path, nargs="?", metavar="FOLDER", help="by default the one that runs this")
    stage.add_argument("--to", metavar="PATH", help="the same on every node; '$VARIABLES' are each node's own")
    stage.add_argument("--nodes", type=int, metavar="N", help="the first N hosts of the job; by default all")
    stage.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, a name a line")
    stage.add_argument("--hosts", metavar="A,B", help="hosts, `a,b`")


def run(arguments: argparse.Namespace) -> int:
    """Do what the verb says."""
    return _create(arguments) if arguments.verb == "create" else _stage(arguments)


def _create(arguments: argparse.Namespace) -> int:
    from polarlm.launch import create_environment, describe_plan, plan_environment, recognise, short_host_name

    site = recognise(short_host_name(), os.environ)
    machine = site.name if site else short_host_name()
    plan = plan_environment(
        arguments.folder, machine, os.environ, site, base=arguments.python, package=arguments.package
    )
    if arguments.dry_run:
        print(describe_plan(plan))
        return 0
    print(
        f"on {plan.base}: {', '.join(map(' '.join, plan.constraints.items())) or 'no torch there, so pip brings one'}"
    )
    folder = create_environment(plan)
    print(f"{folder}: source {shlex.quote(str(folder / 'bin' / 'activate.polarlm'))}")
    return 0


def _stage(arguments: argparse.Namespace) -> int:
    """Copy it everywhere; 1 where a node failed, after the others have it."""
    from polarlm.launch import Distribution, Outcome, Request, on_every_node, why_silent

    source = _environment(arguments.environment)
    to = arguments.to or f"/tmp/polarlm-{os.getuid()}/{source.name}"
    request = Request(nodes=arguments.nodes, hosts=arguments.hosts, host_file=arguments.hostfile)
    heads: list[Distribution] = []

    def begin(hosts):
        heads.append(Distribution(len(hosts)))
        return heads[0].attend

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".polarlm-stage-", dir=Path.cwd()) as name:
        words, logs = [str(source), to], Path(name) / "logs"
        hosts, code = on_every_node("polarlm.launch.stage_node", words, request, os.environ, logs, begin)
        known = heads[0].outcomes
        outcomes = {host: known.get(host) or Outcome(complaint=why_silent(host, logs, code)) for host in hosts}
    return _sum_up(outcomes, time.monotonic() - start)


def _environment(folder: Path | None) -> Path:
    from polarlm.config import UserError

    if folder is None and sys.prefix == sys.base_prefix:
        raise UserError("which environment? This Python runs from none; name its folder")
    source = (folder or Path(sys.prefix)).absolute()
    if not (source / "bin" / "python").exists():
        raise UserError(f"{source}: there is no bin/python, so it is no environment; `polarlm env create` makes one")
    return source


def _sum_up(outcomes: dict, seconds: float) -> int:
    failed = {host: outcome.complaint for host, outcome in outcomes.items() if outcome.complaint}
    for host, complaint in failed.items():
        print(f"FAILED  {host}: {complaint}")
    done = {host: outcome for host, outcome in outcomes.items() if host not in failed}
    if done:
        slowest = max(done, key=lambda host: done[host].seconds)
        size = max(outcome.bytes for outcome in done.values()) / 1e6
        print(
            f"{len(done)} of {len(outcomes)} nodes have its {size:.0f} MB after {seconds:.0f} s "
            f"(slowest: {slowest}, {done[slowest].seconds:.0f} s)"
        )
        paths = {outcome.path for outcome in done.values()}
        if len(paths) == 1:
            print(f"use it: {shlex.quote(f'{paths.pop()}/bin/polarlm')} train run.yaml")
        else:
            print(f"it has different paths ({', '.join(sorted(paths)[:3])}, ...), and a run needs one: stage --to one")
    return int(bool(failed))
