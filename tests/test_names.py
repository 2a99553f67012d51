"""The names that rooms hand out, some of them only when they are asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from polarlm import config, launch


@pytest.mark.parametrize("room", [config, launch])
def test_every_name_is_what_type_checkers_take_it_for(room):
    """They read the imports beside the table that counts when it runs; both must say the same."""
    homes = {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(room.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name in room.__all__:
        assert getattr(room, name) is getattr(sys.modules[homes[name]], name)


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(ImportError, match="cannot import name 'RunConfg'"):
        from polarlm.config import RunConfg  # noqa: F401


def test_what_a_launcher_needs_loads_no_library_of_validation():
    code = (
        "import sys; from polarlm.config import UserError, read_json; import polarlm.launch.enter;"
        "print('pydantic' in sys.modules, 'polarlm.launch.nodes' in sys.modules);"
        "from polarlm.config import RunConfig; print('pydantic' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False False\nTrue\n"
