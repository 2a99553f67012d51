"""What holds for every test: one thread, so that forked workers (ranks.py) never wait for a dead pool of threads; and
no presets of the person who runs them; and that tests for what a machine lacks are named, not passed over."""

import os
import shutil

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["XDG_CONFIG_HOME"] = os.devnull

# What a marked test needs, and whether it is here.
MARKERS = (
    ("gpu", lambda: _has_gpu()),
    ("npm", lambda: shutil.which("npm")),
    ("cluster", lambda: os.environ.get("POLARLM_MPI")),  # `make test-cluster`
)
NOT_RUN = pytest.StashKey[dict[str, list[str]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests of what is not here, since they are no passes; the summary below names them."""
    not_run = {}
    for marker, is_here in MARKERS:
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_here():
            not_run[marker] = [item.nodeid for item in marked]
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in marked]
    config.stash[NOT_RUN] = not_run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that this machine cannot run."""
    for marker, names in config.stash.get(NOT_RUN, {}).items():
        terminalreporter.section(f"not run here: {len(names)} tests need {marker}", yellow=True)
        for name in names:
            terminalreporter.write_line(name)


def _has_gpu() -> bool:
    import torch

    return torch.accelerator.is_available()
