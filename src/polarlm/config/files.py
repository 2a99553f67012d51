"""Files that a stranger may have written: read up to a bound, inside their folder, and only as what they should be.

Every JSON file that decides something goes through `read_json`. What it returns is plain: mappings, lists, texts that
can be printed, whole numbers of 64 bits, finite floats; of the types that a `Record` gives.
"""

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.config.errors import UserError

if TYPE_CHECKING:
    from polarlm.config.record import Record

MOST_JSON_BYTES = 2**24  # twice what the mark of a checkpoint by 20,000 ranks takes
_DEEPEST = 64
_LARGEST = 2**63  # beyond it, no array holds a number


def read_json(
    path: Path, like: "type[Record] | None" = None, *, what: str, mend: str, most_bytes: int = MOST_JSON_BYTES
) -> Any:
    """The value in a JSON file.

    Args:
        like: what it must be; None takes anything.
        what: names it in the message, as in `a manifest`.
        mend: ends the message, as in `remove it`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read, is too large, is not JSON, or is not like that.
    """
    try:
        value = parse_json(read_bytes(path, most_bytes))
        if like is not None:
            like.check(value)
    except ValueError as error:
        raise UserError(f"{path}: is not {what} ({error}); {mend}") from None
    return value


def parse_json(text: bytes | str) -> Any:
    """
    Raises:
        ValueError: it is not JSON; or a key is given twice, a number is not finite or beyond 64 bits, a text is no
            Unicode, or it is nested deeper than anything that PolarLM reads.
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = json.loads(
            text, object_pairs_hook=_mapping, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _check_depth(value)
    if "\\ud" in text.lower():  # half a pair of surrogates, which nothing can print
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """A regular file's content.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be read, is no regular file, or is larger than that.
    """
    with names_file(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: is no regular file; put the file itself there")
        if status.st_size > most_bytes:
            raise UserError(f"{path}: is larger than the {most_bytes} bytes that such a file can have; name another")
        return path.read_bytes()


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of the folder that came with it, to files that are none of its maker's business.

    Raises:
        UserError: `path`, below `folder`, is really elsewhere.
    """
    if leads_outside(path, folder):
        raise UserError(f"{path}: leads to {os.path.realpath(path)}, outside of its folder; put the file itself there")


def leads_outside(path: Path, folder: Path) -> bool:
    """Whether `path`, below `folder`, is really elsewhere, by a link on the way."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """
    Raises:
        UserError: instead of an OSError, but for a missing file's; names the file.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); mend that, or name another") from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:100]!r} is given twice")
    return mapping


def _whole(digits: str) -> int:
    number = int(digits) if len(digits) < 30 else _LARGEST
    if abs(number) >= _LARGEST:
        raise ValueError(f"{digits[:30]} is beyond 64 bits")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:30]} is not a finite number")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise ValueError("it is nested too deep")
