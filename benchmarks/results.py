"""What every benchmark says of itself: the machine, the command, the numbers as JSON and as a Markdown table."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def describe_machine(*packages: str) -> dict[str, Any]:
    """The processor, its cores, how busy it is already, and the versions of `packages`."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: installed_version(package) for package in packages},
    }


def installed_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def publish(name: str, result: dict[str, Any], table: str) -> None:
    """Print the table, and write the result with the command that gave it into `results/NAME.json`."""
    command = shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps({"command": command, **result}, indent=2) + "\n")
    print(f"{table}\n\n{FOLDER / f'{name}.json'} holds every number")


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _processor() -> str:
    """A processor's own name, with its model number, since several share one name on virtual machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return "{} (family {}, model {})".format(*(facts.get(name) for name in ("model name", "cpu family", "model")))
