"""The run that faults befall, and the table of what came of them, which `make faults` prints."""

import os
import shutil

import pytest

from faults.small_run import SmallRun, write_text
from faults.table import EVERY, RANKS, STEPS, Outcome

OUTCOMES = pytest.StashKey[dict[str, Outcome]]()


@pytest.fixture(scope="session")
def outcomes(pytestconfig):
    """What was measured of each fault, by its name."""
    return pytestconfig.stash.setdefault(OUTCOMES, {})


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """The data of every run here."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    write_text(prefix)
    return prefix


@pytest.fixture(scope="session")
def straight(tmp_path_factory, text):
    """The run that nothing befalls."""
    run = SmallRun(tmp_path_factory.mktemp("straight"), text, steps=STEPS, every=EVERY, ranks=RANKS, zero_stage=1)
    run.go_on()
    return run


@pytest.fixture(scope="session")
def begun(tmp_path_factory, text):
    """The same, saved at steps 5 and 10, and no further."""
    run = SmallRun(tmp_path_factory.mktemp("begun"), text, steps=10, every=EVERY, ranks=RANKS, zero_stage=1)
    run.go_on()
    return run


@pytest.fixture
def run(tmp_path, text, begun):
    """A copy of what is begun, for something to befall it."""
    shutil.copytree(begun.home, tmp_path / "home", symlinks=True)
    return SmallRun(tmp_path / "home", text, steps=STEPS, every=EVERY, ranks=RANKS, zero_stage=1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash.get(OUTCOMES, {})
    if "POLARLM_KILLS" in os.environ and outcomes:
        terminalreporter.write_line("| fault | what happened | steps lost | data lost |\n|---|---|---|---|")
        for name, outcome in outcomes.items():
            terminalreporter.write_line(row(name, outcome))


def row(name: str, outcome: Outcome) -> str:
    """A line of the table."""
    return f"| {name} | {outcome.happened} | {outcome.steps_lost} | {outcome.data_lost} |"
