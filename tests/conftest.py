"""What holds for every test: one thread, so that forked workers (ranks.py) never wait for a dead pool of threads; and
no presets of the person who runs them; and that tests for what a machine lacks are named, not passed over."""

import os
import shutil
import signal
import subprocess
from functools import partial

import pytest

from cluster.provide import lacking_mpi, lacking_room, lacking_slurm

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["XDG_CONFIG_HOME"] = os.devnull
# Behind a shell's `&` or nohup it is ignored, by all that are started here too, and theirs is what some tests test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These install packages and start daemons, so they run only when they are asked for, as `make test-cluster` does.
collect_ignore = ["cluster"]

NOT_RUN = pytest.StashKey[dict[str, list[str]]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests of what is not here, since they are no passes; the summary below names them."""
    not_run = {}
    for marker, lacking in LACKING.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := lacking()):
            not_run[f"{marker}: {reason}"] = [item.nodeid for item in marked]
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in marked]
    config.stash[NOT_RUN] = not_run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that this machine cannot run."""
    for need, names in config.stash.get(NOT_RUN, {}).items():
        terminalreporter.section(f"not run here: {len(names)} tests need {need}", yellow=True)
        for name in names:
            terminalreporter.write_line(name)


@pytest.fixture
def start_process():
    """Start programs, with what they say in pipes, as text; none of them outlives the test."""
    started = []

    def start(command, **options):
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _lacking_gpu() -> str:
    import torch

    return "" if torch.accelerator.is_available() else "there is none"


# What tests may need, by marker: why it is not here, or nothing where it is.
LACKING = {
    "gpu": _lacking_gpu,
    "npm": lambda: "" if shutil.which("npm") else "it is not installed",
    "room": lacking_room,
    "slurm": lacking_slurm,
    "mpich": partial(lacking_mpi, "mpich"),
    "openmpi": partial(lacking_mpi, "openmpi"),
}
