"""The table of rooms: who may import whom, which rooms do without torch, and that imports never go in a circle.

Imports are read from the source, those inside functions too; a fresh process then confirms what really gets loaded.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polarlm

SOURCE = Path(polarlm.__file__).parent

# Every room may import `config` besides.
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "launch": set(),
    "plan": set(),
    "data": set(),
    "model": set(),
    "report": set(),
    "parallel": {"model"},
    "checkpoint": {"model", "parallel"},
    "train": {"data", "model", "parallel", "checkpoint", "plan", "launch"},
    "generate": {"data", "model", "parallel", "checkpoint"},
    "verify": {"train", "plan"},
    "bench": {"train", "plan"},
    "tune": {"train", "generate"},
    "evaluate": {"data", "model", "parallel", "checkpoint", "generate"},
    "convert": {"data", "model", "parallel", "checkpoint", "generate"},
    "serve": {"data", "model", "parallel", "checkpoint", "generate"},
    "genome": {"data", "generate"},
}
# These drive the training step itself, so whatever `train` stands on is theirs too.
for driver in ("verify", "bench", "tune"):
    MAY_IMPORT[driver] |= MAY_IMPORT["train"]
MAY_IMPORT["cli"] = set(MAY_IMPORT)

WITHOUT_TORCH = ("config", "launch", "plan", "data", "report")
HEAVY = {"torch", "mpi4py", "transformers"}

MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
ROOMS = sorted({name.split(".")[1] for name, path in MODULES.items() if path.parent != SOURCE})


def imported(module: str, only_at_import: bool = False) -> Iterator[str]:
    """Full names of what a module imports; `from a import b` is `a.b` where that is a module of ours."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _at_import(tree) if only_at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: everything but the insides of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _at_import(node)


def modules_of(room: str) -> list[str]:
    return [name for name in MODULES if name == f"polarlm.{room}" or name.startswith(f"polarlm.{room}.")]


def rooms_imported(room: str) -> dict[str, str]:
    """Other rooms that a room imports, each with a module that does it."""
    names = ((name.split("."), module) for module in modules_of(room) for name in imported(module))
    return {
        parts[1]: module for parts, module in names if parts[0] == "polarlm" and len(parts) > 1 and parts[1] != room
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_lets_it(room):
    assert room in MAY_IMPORT, f"{room} is no room of the table"
    allowed = MAY_IMPORT[room] | {"config"}
    strangers = {other: module for other, module in rooms_imported(room).items() if other not in allowed}
    assert strangers == {}, f"{room} may import {sorted(allowed)}"


def test_rooms_never_import_in_a_circle():
    graph = {room: set(rooms_imported(room)) for room in ROOMS}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_modules_never_import_in_a_circle():
    graph = {module: set(imported(module, only_at_import=True)) & set(MODULES) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_lives_in_it(room):
    path = MODULES.get(f"polarlm.{room}")
    assert path, f"{room} has no __init__.py"
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("room", [room for room in WITHOUT_TORCH if room in ROOMS])
def test_a_room_without_torch_imports_none_even_later(room):
    found = {(module, name) for module in modules_of(room) for name in imported(module) if name.split(".")[0] in HEAVY}
    assert found == set()


@pytest.mark.parametrize("room", [room for room in WITHOUT_TORCH if room in ROOMS])
def test_a_room_without_torch_loads_none(room):
    code = f"import importlib, sys; [importlib.import_module(name) for name in {modules_of(room)}]; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(result.stdout.split())


def test_the_launcher_needs_the_standard_library_alone():
    names = {name.split(".")[0] for module in modules_of("launch") for name in imported(module)}
    assert names - sys.stdlib_module_names == {"polarlm"}
