"""No file is ever read in a way that could run what stands in it."""

import ast
from pathlib import Path

import pytest

import polarlm

SOURCES = sorted(Path(polarlm.__file__).parent.rglob("*.py"))
# What reads a pickle, or builds whatever object a file names.
UNSAFE = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "weights_only", "allow_pickle", "full_load"}
UNSAFE |= {"unsafe_load", "UnsafeLoader", "FullLoader", "FileSystemReader", "literal_eval", "torch.load", "torch.save"}


def _names(text):
    """Every name that code uses: what it imports, looks up, calls with; `a.b` for what is looked up in a name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (part for alias in node.names for part in alias.name.split("."))
            yield from (getattr(node, "module", None) or "").split(".")
        elif isinstance(node, ast.Attribute):
            yield node.attr
            yield f"{getattr(node.value, 'id', '')}.{node.attr}"
        elif isinstance(node, ast.keyword):
            yield node.arg


def test_nothing_reads_a_pickle():
    """But what verify's own processes tell one another over a pipe, which is no file."""
    assert len(SOURCES) > 50
    found = {(path.parent.name, path.name) for path in SOURCES if UNSAFE & set(_names(path.read_text()))}
    assert found == {("verify", "workers.py")}


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "import pickle as p",
        "from pickle import loads",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_reads_one_would_be_found(line):
    assert UNSAFE & set(_names(line))


def test_nothing_evaluates_a_text():
    calls = [
        (path.name, node.func.id)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert [call for call in calls if call[1] in ("eval", "exec", "compile", "__import__")] == []
    assert len(calls) > 1000


def test_what_strangers_write_is_read_within_bounds():
    """Where these rooms read JSON without `read_json`, it is a line of a corpus or what a library has just written."""
    rooms = ("config", "data", "checkpoint", "generate", "model", "parallel")
    sources = {path.relative_to(SOURCES[0].parent): path.read_text() for path in SOURCES}
    found = {path.as_posix() for path, text in sources.items() if path.parts[0] in rooms and "json.load" in text}
    assert found == {"config/files.py", "data/fast.py", "data/readers.py"}
