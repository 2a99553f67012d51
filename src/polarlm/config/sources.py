"""Where a run's values come from: a YAML file, the deck's environment variables, flags. Each keeps its origin.

A value travels as raw text or YAML scalars under its path (`train.seq_len`); types are checked once, at the end,
on the merged whole, so that a flag, a variable and a line of the file mean the same and fail with the same words.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from polarlm.config.errors import UserError
from polarlm.config.files import names_file

_MOST_BYTES = 2**18
_MOST_NODES = 10_000  # a file that grows past this by its aliases is not a configuration
_DEEPEST = 50
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Value:
    """One leaf of the configuration: what was given, and where (`run.yaml:7`, `SEQ_LEN`, `--train.seq-len`)."""

    value: Any
    origin: str


_KEY = re.compile(r"\w+(\.\w+)*")
_SHORT = {"model": "model.preset", "profile": "log.profile"}

Leaves = dict[str, Value]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `1e-5` is a number, `on` and `12:30` are text. Mappings, lists and scalars are all there is."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node with all below it, as far down as a run file goes."""
        self._depth += 1
        self._check_depth(self._depth)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def fetch_flow_collection_start(self, token: Any) -> None:
        """A `[` or `{`; refused here, since the scanner looks at every open one again at each token."""
        self._check_depth(self.flow_level)
        super().fetch_flow_collection_start(token)

    def _check_depth(self, depth: int) -> None:
        if depth > _DEEPEST:
            raise yaml.YAMLError(f"nested deeper than {_DEEPEST} levels")

    def get_single_node(self) -> Any:
        """The document's root, or None; it is known by now how much its aliases stand for, and that no tag lies."""
        root = super().get_single_node()
        waiting, count = [] if root is None else [root], 0
        while waiting:
            node = waiting.pop()
            count += 1
            if count > _MOST_NODES:
                raise yaml.YAMLError(f"more than {_MOST_NODES} values, with all that its aliases stand for")
            if node.tag not in self._tags_of(node):
                kind = node.tag.removeprefix(_TAG)
                raise ConstructorError(None, None, f"the tag {kind!r} does not fit; leave it out", node.start_mark)
            if isinstance(node, yaml.MappingNode):
                waiting += [each for pair in node.value for each in pair]
            elif isinstance(node, yaml.SequenceNode):
                waiting += node.value
        return root

    def _tags_of(self, node: Any) -> tuple[str, ...]:
        untyped: Any = self
        if isinstance(node, yaml.ScalarNode):
            return f"{_TAG}str", untyped.resolve(yaml.ScalarNode, node.value, (True, False))
        return (f"{_TAG}map" if isinstance(node, yaml.MappingNode) else f"{_TAG}seq",)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9][0-9_]{0,99}$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(_pattern), list(_first))
# YAML 1.2 has no octal `010`.
_Loader.add_constructor(f"{_TAG}int", lambda loader, node: int(node.value.replace("_", "")))


def parse_scalar(text: str) -> Any:
    """The value a YAML file would give for this text; text that is not YAML is itself."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def from_yaml(path: Path) -> Leaves:
    """The leaves of a run file, each with its file and line; of an empty value, None.

    Raises:
        UserError: no such file, not UTF-8, not YAML, not a mapping, a key given twice.
    """
    try:
        loader = _Loader(_read_text(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; `polarlm init {path}` writes one to start from") from None
    except (ValueError, yaml.YAMLError) as error:  # what is not UTF-8, or no character of a text
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{path}:1: a run file is a mapping such as `train:`, not a list or a single value")
        leaves: Leaves = {}
        for key, value in _walk(loader, root, path, ()):
            if key in leaves:
                raise UserError(f"{value.origin}: {key} is given twice (before: {leaves[key].origin})")
            leaves[key] = value
        return leaves
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()


def _read_text(path: Path) -> str:
    with names_file(path), path.open("rb") as file:  # a pipe, too
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path}: is larger than {_MOST_BYTES} bytes, so no run file; put long lists in data.file_list")
    return content.decode()


def _walk(loader: _Loader, node: Any, path: Path, prefix: tuple[str, ...]) -> Iterator[tuple[str, Value]]:
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node, deep=True)
        yield ".".join(prefix), Value(value, f"{path}:{node.start_mark.line + 1}")
        return
    for key_node, value_node in node.value:
        # A mapping inside a list is a value; a mapping under a key is a section.
        yield from _walk(loader, value_node, path, (*prefix, str(loader.construct_object(key_node))))


def from_flags(flags: Sequence[str]) -> Leaves:
    """The leaves of flags such as `--train.seq-len 2048`, `--model GPT125M`, `--data.paths a b`, `--train.compile`.

    Raises:
        UserError: a word that belongs to no flag.
    """
    leaves: Leaves = {}
    for flag, words in _groups(flags):
        key = flag.removeprefix("--").replace("-", "_")
        key = _SHORT.get(key, key)
        if not _KEY.fullmatch(key):
            raise UserError(f"{flag}: not the path of a field, such as --train.seq-len")
        values = [parse_scalar(word) for word in words] or [True]
        leaves[key] = Value(values[0] if len(values) == 1 else values, flag)
    return leaves


def _groups(flags: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    words = list(flags)
    if words and not words[0].startswith("--"):
        raise UserError(f"{words[0]}: not a flag; a value follows its flag, as in `--train.steps 100`")
    while words:
        flag, equals, inline = words.pop(0).partition("=")
        values = [inline] if equals else []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        yield flag, values


def merge(*sources: Mapping[str, Value]) -> Leaves:
    """Later sources win, leaf by leaf."""
    merged: Leaves = {}
    for source in sources:
        merged |= source
    return merged


def as_tree(leaves: Mapping[str, Value]) -> dict[str, Any]:
    """`{"train.steps": 5}` -> `{"train": {"steps": 5}}`.

    Raises:
        UserError: a value where a section is expected, such as `train: 5` beside `--train.steps 5`.
    """
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *sections, last = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise UserError(f"{leaf.origin}: {section} is given as a value and as a section")
        if isinstance(branch.get(last), dict):
            raise UserError(f"{leaf.origin}: {key} is given as a value and as a section")
        branch[last] = leaf.value
    return tree
