"""What holds for every test: one thread, so that forked workers (ranks.py) never wait for a dead pool of threads; and
no presets of the person who runs them; and that tests for a GPU are named, not passed over, where there is none."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["XDG_CONFIG_HOME"] = os.devnull

NOT_RUN = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the tests marked `gpu` where there is none, since they are no passes; the summary below names them."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if torch.accelerator.is_available():
        return
    config.stash[NOT_RUN] = [item.nodeid for item in on_gpu]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that this machine cannot run."""
    names = config.stash.get(NOT_RUN, [])
    if names:
        terminalreporter.section(f"not run here: {len(names)} tests need a GPU", yellow=True)
        for name in names:
            terminalreporter.write_line(name)
