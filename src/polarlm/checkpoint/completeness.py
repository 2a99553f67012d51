"""When to trust a checkpoint's folder: the mark, written last, tells size and SHA-256 of every file."""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from polarlm.config import Record, UserError, leads_outside, one_line, read_json

MARK = "complete.json"
STATE = "state.json"


class _File(Record):
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class _Mark(Record):
    files: dict[str, _File]


def write_json(value: object, path: Path) -> None:
    """Write `value` as JSON, and wait until the disk has it."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mark_complete(folder: Path, digests: Mapping[str, str]) -> None:
    """Wait until the disk has the names of what is in `folder`, then put the mark there.

    Args:
        digests: SHA-256 of every file, by its path from there; the disk has their content.

    Raises:
        FileNotFoundError: another rank has written one that is not to be seen from here.
    """
    files = {name: folder / name for name in digests}
    if missing := [name for name, path in files.items() if not path.exists()]:
        raise FileNotFoundError(errno.ENOENT, f"{missing[0]} lies on another host's own disk; share the run's folder")
    for parent in {path.parent for path in files.values()}:
        sync(parent)
    record = {name: {"bytes": path.stat().st_size, "sha256": digests[name]} for name, path in files.items()}
    write_json({"files": record}, folder / MARK)
    sync(folder)


def fault_of(folder: Path, with_digests: bool = False) -> str | None:
    """Why the checkpoint in `folder` is not to be trusted, or None.

    Args:
        with_digests: read every byte, and not only the mark and the files' sizes.
    """
    try:
        fault = _fault_of(folder, with_digests)
    except FileNotFoundError as error:  # the run that wrote it deletes it at this very moment
        fault = f"{Path(error.filename).name} has gone"
    return None if fault is None else one_line(fault)


def _fault_of(folder: Path, with_digests: bool) -> str | None:
    if outside := next((path for path in folder.rglob("*") if path.is_symlink() and leads_outside(path, folder)), None):
        return f"{outside.relative_to(folder)} is a link that leads outside"
    try:
        record = read_json(folder / MARK, _Mark, what="a mark", mend="choose another")["files"]
    except FileNotFoundError:
        return f"{MARK} is missing, so it was not written to its end"
    except UserError:
        return f"{MARK} is damaged"
    expected = {name: (file["bytes"], file["sha256"]) for name, file in record.items()}
    files = _files(folder)
    if STATE not in expected:
        return f"{MARK} says nothing of {STATE}"
    # Names from the mark are only compared with what is there, so it cannot point outside.
    if missing := sorted(expected.keys() - files.keys()):
        return f"{missing[0]} is missing"
    if added := sorted(name for name in files.keys() - expected.keys() if name.endswith(".safetensors")):
        return f"{added[0]} was not written with it"
    for name, (size, digest) in expected.items():
        if files[name].stat().st_size != size:
            return f"{name} has {files[name].stat().st_size} bytes, not the {size} that were written"
        if with_digests and digest_of(files[name]) != digest:
            return f"{name} has other bytes than were written"
    return None


def _files(folder: Path) -> dict[str, Path]:
    """Every file below `folder` but the mark, by its path from there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / MARK}


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
