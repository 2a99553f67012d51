"""`environment.json`: what a run ran with, so that a result can be traced to it."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

import polarlm
from polarlm.config import RunConfig
from polarlm.launch import short_host_name
from polarlm.parallel import World, deterministic_variables


def describe_environment(config: RunConfig, world: World) -> dict[str, Any]:
    """Versions, source, hosts, device and layout; every rank calls, since each names its host."""
    hosts = world.gather(short_host_name())
    return {
        "polarlm": polarlm.__version__,
        "git": _git_state(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": world.device.name,
        "threads_per_rank": torch.get_num_threads(),
        "hosts": list(dict.fromkeys(hosts)),
        "layout": config.parallel.model_dump(),
        "deterministic": deterministic_variables(world.device) if config.train.deterministic else None,
    }


def _git_state() -> str | None:
    """The commit this package's source is at, with `+changes` where it is not all committed; None outside git."""
    describe = [
        "git",
        "-C",
        str(Path(polarlm.__file__).parent),
        "describe",
        "--always",
        "--dirty=+changes",
        "--abbrev=12",
    ]
    try:
        described = subprocess.run(describe, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
