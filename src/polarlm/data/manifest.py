"""`PREFIX.json`: what a dataset is, how it was prepared, and by what its two files are known again.

Of each file it keeps the size, the digest of the whole, and the digest of a sample of blocks. Size and sample are
compared whenever the dataset is opened, on every rank: they tell a file that was replaced, cut or written over, at the
price of a few small reads. A change between the blocks of a large file takes the whole digest, `polarlm data check`.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt

from polarlm.config import Record, UserError, check_inside, read_json
from polarlm.data.aside import aside_of, mark_as_written, names_output, to_disk

_SUFFIXES = (".bin", ".idx")
_BLOCKS, _BLOCK_BYTES = 16, 4096  # of the sample; a file of no more bytes is sampled whole


class _Tokenizer(Record):
    path: str | None = None
    digest: str | None = None
    vocab_size: NonNegativeInt = 0


class _File(Record):
    size: NonNegativeInt
    sha256: str
    sample_sha256: str = ""


class _Manifest(Record):
    documents: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    skipped_bad: NonNegativeInt = 0
    tokenizer: _Tokenizer = _Tokenizer()
    files: dict[str, _File] = Field(default_factory=dict)


def write_manifest(prefix: str | Path, described: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest, the last file of a dataset, and return it: `described`, and what tells the other two.

    Raises:
        UserError: it cannot be written.
    """
    files = {}
    for path in _files_of(prefix):
        files[path.name] = {"size": path.stat().st_size, "sha256": _digest(path), "sample_sha256": _sample_digest(path)}
    manifest = {**described, "files": files}
    path = Path(f"{prefix}.json")
    with names_output(prefix), aside_of(path).open("wb") as file:
        mark_as_written(file)
        file.write((json.dumps(manifest, indent=2) + "\n").encode())
        to_disk(file)
        os.replace(file.name, path)
    return manifest


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest; None where there is none.

    Raises:
        UserError: it is not JSON, not a manifest, or a link that leads out of its folder.
    """
    path = Path(f"{prefix}.json")
    try:
        check_inside(path, path.parent)
        return read_json(path, _Manifest, what="a manifest as `polarlm data prepare` writes it", mend="remove it")
    except FileNotFoundError:
        return None


def compare_samples(prefix: str | Path, manifest: dict[str, Any] | None) -> None:
    """Compare sizes and samples of a dataset's files with what its manifest says, as far as it does.

    Raises:
        UserError: names the file that is another.
    """
    for path, entry in _described(prefix, manifest):
        _compare(path, entry, "size", path.stat().st_size)
        if entry.get("sample_sha256"):
            _compare(path, entry, "sample_sha256", _sample_digest(path))


def compare_whole(prefix: str | Path, manifest: dict[str, Any] | None) -> None:
    """Compare every byte of a dataset's files with what its manifest says.

    Raises:
        UserError: names the file that is another; or there is no manifest to compare with.
    """
    described = _described(prefix, manifest)
    if not described:
        raise UserError(f"{prefix}.json: is not there, or says nothing of the files; there is nothing to compare with")
    for path, entry in described:
        _compare(path, entry, "size", path.stat().st_size)
        _compare(path, entry, "sha256", _digest(path))


def _described(prefix: str | Path, manifest: dict[str, Any] | None) -> list[tuple[Path, dict[str, Any]]]:
    """The dataset's files with their entries; the names in the manifest are of before a dataset was renamed."""
    entries = {Path(name).suffix: entry for name, entry in (manifest or {}).get("files", {}).items()}
    return [(path, entries[path.suffix]) for path in _files_of(prefix) if path.suffix in entries]


def _compare(path: Path, entry: dict[str, Any], name: str, found: int | str) -> None:
    if found != entry[name]:
        raise UserError(
            f"{path}: is not the file that {path.with_suffix('.json')} describes, by its {name}: {found}, not "
            f"{entry[name]}; bring that file back, or prepare the data again"
        )


def _files_of(prefix: str | Path) -> list[Path]:
    return [Path(f"{prefix}{suffix}") for suffix in _SUFFIXES]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sample_digest(path: Path) -> str:
    """SHA-256 of blocks spread evenly from the first to the last byte."""
    size = path.stat().st_size
    if size <= _BLOCKS * _BLOCK_BYTES:
        return _digest(path)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for number in range(_BLOCKS):
            file.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
