"""Files as accident or malice would leave them, the same at every run; and what loading them may come to."""

import copy
import gc
import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polarlm.config import UserError

MUTANTS = 200  # of each kind of files
_MOST_SECONDS = 1.0  # of this process's time, for one file
_MOST_KIB = 2**18
_RAW = "\ue000"  # stands around a text that goes into the JSON as it is

REFUSED = object()

# Whole JSON texts, each instead of one value.
JSON_VALUES = [
    "null", "true", "-1", "0", "1", "0.5", "1e300", "-1e300", "1e999", "NaN", "-Infinity", "9" * 25, "1" * 5000,
    str(2**31), str(2**32 - 1), str(2**63), str(2**64), '""', '"x"', '"../../secret"', '"/etc/passwd"', '"a\\u0000b"',
    '"\\ud800"', '"line\\nbreak \\u001b[2J"', '"' + "a" * 100_000 + '"', "[]", "{}", "[[]]", '{"a": 1}', "[1, 2, 3]",
    "[" * 100_000, "[" * 100 + "]" * 100, '{"a": 1, "a": 2}', "",
]  # fmt: skip


def outcome_of(action: Callable[[], Any], *places: Path | str) -> Any:
    """What an action comes to: its value, or `REFUSED` where it ends in lines that each begin with one of the places.

    Whatever else it raises, more than a second of work, and much memory fail the test.
    """
    gc.freeze()  # collecting what other tests left in this process is no work of the action's
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        value = action()
    except UserError as error:
        for line in str(error).splitlines():
            assert line.isprintable(), line
            assert len(line) < 2500, line[:100]
            assert line.startswith(tuple(map(str, places))), line
        value = REFUSED
    seconds = time.process_time() - start
    gc.unfreeze()
    assert seconds < _MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < _MOST_KIB
    return value


def mutants(content: bytes, seed: int, count: int, of_json: bool = False) -> Iterator[bytes]:
    """Changed contents: where it is JSON, every second one is JSON of another meaning, as far as it is JSON at all."""
    chance = random.Random(seed)
    for number in range(count):
        mutate = changed_json if of_json and number % 2 else changed_bytes
        yield mutate(content, chance)


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bits turned, bytes written over, cut off, cut out, put in, or nothing left."""
    changed, place = bytearray(content), chance.randrange(len(content) + 1)
    kind = chance.choice(["turn", "turn", "write", "cut", "cut out", "put in", "double", "empty"])
    if kind in ("turn", "write"):
        for _ in range(chance.choice([1, 1, 2, 8])):
            place = chance.randrange(len(changed))
            changed[place] = changed[place] ^ 1 << chance.randrange(8) if kind == "turn" else chance.randrange(256)
    elif kind == "cut":
        del changed[place:]
    elif kind == "cut out":
        del changed[place : place + chance.choice([1, 7, 100])]
    elif kind == "put in":
        changed[place:place] = chance.randbytes(chance.choice([1, 8, 100]))
    elif kind == "double":
        changed[place:place] = changed[: chance.choice([8, 64])]
    else:
        changed.clear()
    return bytes(changed)


def changed_json(content: bytes, chance: random.Random) -> bytes:
    """One value, chosen by chance, made another or taken out, or its key made another."""
    value = json.loads(content)
    paths = list(_paths(value))
    *way, last = chance.choice(paths)
    parent = value
    for step in way:
        parent = parent[step]
    kind = chance.choice(["other", "other", "other", "other", "out", "twice", "rename"])
    if kind == "out":
        del parent[last]
    elif kind == "rename" and isinstance(parent, dict):
        parent[chance.choice(["", "x", "../x", "__class__", "a\n\x1b[2J"])] = parent.pop(last)
    elif kind == "twice" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last]))
    else:
        parent[last] = f"{_RAW}{len(JSON_VALUES)}{_RAW}"
    text = json.dumps(value, ensure_ascii=False)
    return text.replace(f'"{_RAW}{len(JSON_VALUES)}{_RAW}"', chance.choice(JSON_VALUES)).encode()


def _paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for step, inner in steps:
        yield (*path, step)
        yield from _paths(inner, (*path, step))
