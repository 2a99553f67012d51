"""Every run file that we ship is one that the program takes."""

from pathlib import Path

import pytest

import polarlm.cli
from polarlm.config import load_run

ROOT = Path(__file__).parents[2]
SHIPPED = [*ROOT.glob("examples/*.yaml"), *Path(polarlm.cli.__file__).parent.glob("*.yaml")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_run_files_load(path):
    assert load_run(path, environment={}, devices=1).config.train.steps > 0
