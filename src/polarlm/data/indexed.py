"""Token ids on disk: Megatron-LM's indexed dataset, `PREFIX.bin` and `PREFIX.idx`, little-endian.

`.idx`: 9 bytes `MMIDIDX\\0\\0`; u64 version 1; u8 dtype code; u64 number of sequences; u64 length of the document
index; int32 sizes in tokens; int64 pointers, byte offsets into `.bin`; int64 document index, the sequence that each
document starts with and, last, the number of sequences. `.bin`: the ids, one sequence after the other.
"""

import contextlib
import logging
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.config import UserError, check_inside
from polarlm.data.aside import aside_of, mark_as_written, names_output, remove_abandoned, to_disk
from polarlm.data.manifest import compare_samples, read_manifest, write_manifest
from polarlm.data.output import make_folder, remove_empty

_log = logging.getLogger(__name__)

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # the integer ones
_CHECKED_BYTES = 2**20  # of an index that opening reads whole
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def smallest_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id below `vocab_size` fits it, else int32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)


def pointers_of(sizes: np.ndarray, itemsize: int) -> np.ndarray:
    """Byte offset of each sequence, int64 whatever the type of `sizes`: a corpus outgrows 32 bits long before disks."""
    ends = np.cumsum(sizes, dtype=np.int64) * itemsize
    return np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])


class IndexedDataset:
    """A dataset on disk, read through memory maps: opening it reads the header, and no array is ever copied whole.

    Attributes:
        dtype: of the ids.
        sizes: int32 [sequences], tokens of each.
        pointers: int64 [sequences], byte offset of each.
        document_index: int64 [documents + 1], the sequence that each document starts with.
        tokens: number of ids in all.
        manifest: what `polarlm data prepare` recorded in `PREFIX.json`, or None.

    Raises:
        UserError: a file is missing, damaged, not of this format, not the one that the manifest describes, or a link
            that leads out of its folder. The middle of an index, which opening does not read, is refused where it is
            used; `check_index` reads it whole.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index_path, ids_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (index_path, ids_path):
            if not path.is_file():
                raise UserError(f"data.paths: {path} is not there; `polarlm data prepare` makes it")
            check_inside(path, path.parent)
        self.dtype, sequences = _read_header(index_path)
        index = _map(index_path, np.dtype(np.uint8))[_HEADER.size :]
        sizes, pointers = 4 * sequences, 8 * sequences
        self.sizes = index[:sizes].view("<i4")
        self.pointers = index[sizes : sizes + pointers].view("<i8")
        self.document_index = index[sizes + pointers :].view("<i8")
        self.tokens = ids_path.stat().st_size // self.dtype.itemsize
        self._check_ends(index_path, ids_path)
        self._ids = _map(ids_path, self.dtype)
        self.manifest = read_manifest(prefix)
        compare_samples(prefix, self.manifest)

    def identity(self) -> dict[str, str | int]:
        """What tells this data from other data of its name: sizes, and the ids' digest where a manifest has it."""
        files = (self.manifest or {}).get("files", {})
        digests = {name: entry.get("sha256", "") for name, entry in sorted(files.items())}
        return {"tokens": self.tokens, "documents": self.documents, **digests}

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """The ids of a sequence, [its size], in the file's own type."""
        return self.read(int(self.pointers[sequence]) // self.dtype.itemsize, int(self.sizes[sequence]))

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    def document(self, number: int) -> np.ndarray:
        """The ids of a document."""
        start, stop = self.document_start(number), self.document_start(number + 1)
        return self.read(start, stop - start)

    def document_start(self, number: int) -> int:
        """Place of a document's first id in the stream of all ids; for the number `documents`, the stream's end."""
        sequence = int(self.document_index[number])
        if sequence == len(self):
            return self.tokens
        if not 0 <= sequence < len(self):
            raise self.damaged(f"document {number} begins with sequence {sequence} of {len(self)}")
        place, rest = divmod(int(self.pointers[sequence]), self.dtype.itemsize)
        if rest or not 0 <= place <= self.tokens:
            raise self.damaged(f"sequence {sequence} begins at byte {self.pointers[sequence]}")
        return place

    def starts_of(self, first: int, stop: int) -> np.ndarray:
        """`document_start` of documents `first` .. `stop` - 1, int64; what it costs depends on their number alone."""
        sequences = self.document_index[first:stop].astype(np.int64)
        if ((sequences >= 0) & (sequences < len(self))).all():
            places, rest = np.divmod(self.pointers[sequences], self.dtype.itemsize)
            if not rest.any() and ((places >= 0) & (places <= self.tokens)).all():
                return places
        return np.array([self.document_start(number) for number in range(first, stop)])  # or says what is wrong

    def document_at(self, place: int) -> int:
        """The document that holds a place of the stream of all ids."""
        # Not np.searchsorted: the header leaves the index unaligned, and NumPy would copy all of it at every call.
        return bisect_right(range(self.documents), place, key=self.document_start) - 1

    def document_starts(self) -> np.ndarray:
        """`document_start` of each document and of the end, int64 [documents + 1]."""
        self.check_index()
        ends = np.append(self.pointers, self.tokens * self.dtype.itemsize)
        return ends[self.document_index] // self.dtype.itemsize

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids of the stream of all ids, from place `start`, as far as there are."""
        if start < 0 or count < 0:  # which numpy would count from the end
            raise self.damaged(f"there are no {count} tokens from {start} on")
        return self._ids[start : start + count]

    def check_index(self) -> None:
        """Read the whole index.

        Raises:
            UserError: its sequences do not lie one after the other, or its documents are not in order.
        """
        ends = self.pointers + self.sizes.astype(np.int64) * self.dtype.itemsize
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(self)]
        if (self.sizes < 0).any() or not np.array_equal(self.pointers, starts):
            raise self.damaged("its sequences do not lie one after the other")
        if (self.document_index[1:] < self.document_index[:-1]).any():
            raise self.damaged("its documents are not in order")

    def damaged(self, fault: str) -> UserError:
        """What to raise where the index says what cannot be."""
        return UserError(f"{self.prefix}.idx: {fault}; the file is damaged, prepare the data again")

    def _check_ends(self, index_path: Path, ids_path: Path) -> None:
        """Refuse files that do not belong together, among them those of a writer whose sizes left out a token."""
        first, last = int(self.document_index[0]), int(self.document_index[-1])
        if (first, last) != (0, len(self)):
            raise UserError(
                f"{index_path}: its documents run from sequence {first} to {last}, not from 0 to {len(self)}; "
                "the file is damaged, prepare the data again"
            )
        end = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize if len(self) else 0
        forgotten = ids_path.stat().st_size - end == self.documents * self.dtype.itemsize > 0
        if forgotten and (self.document_index[1:] > self.document_index[:-1]).all():
            _log.warning(
                "%s: an old writer left the end-of-document token out of its sizes; it is counted in", index_path
            )
            self.sizes = np.array(self.sizes)
            self.sizes[self.document_index[1:] - 1] += 1  # the last sequence of each document
            self.pointers = pointers_of(self.sizes, self.dtype.itemsize)
            end = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        if end != ids_path.stat().st_size:
            raise UserError(
                f"{ids_path}: has {ids_path.stat().st_size} bytes and its index accounts for {end}; "
                "the two do not belong together, prepare the data again"
            )
        if ids_path.stat().st_size % self.dtype.itemsize:
            raise UserError(
                f"{ids_path}: has {ids_path.stat().st_size} bytes, which are no whole {self.dtype.name} ids; "
                "the file is cut or damaged, prepare the data again"
            )
        if index_path.stat().st_size <= _CHECKED_BYTES:
            self.check_index()


def merge(prefixes: Sequence[str], output: Path) -> dict[str, Any]:
    """Write the documents of several datasets, one after the other and without empty ones, as one dataset, and return
    its manifest.

    Raises:
        UserError: a dataset cannot be read, or they were prepared with different tokenizers.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizers = [(dataset.manifest or {}).get("tokenizer") for dataset in datasets]
    if len({(tokenizer or {}).get("digest") for tokenizer in tokenizers}) > 1:
        raise UserError(f"{', '.join(prefixes)}: do not all say that the same tokenizer made them")
    documents = 0
    with IndexedWriter(output, np.result_type(*(dataset.dtype for dataset in datasets))) as writer:
        for dataset in datasets:
            for ids in filter(len, map(dataset.document, range(dataset.documents))):
                writer.add_document(ids)
                documents += 1
    counts: dict[str, Any] = {"documents": documents, "tokens": sum(dataset.tokens for dataset in datasets)}
    manifests = [dataset.manifest or {} for dataset in datasets]
    for key in ("bytes", "skipped", "skipped_bad"):
        if all(key in manifest for manifest in manifests):
            counts[key] = sum(manifest[key] for manifest in manifests)
    return write_manifest(output, counts | ({"tokenizer": tokenizers[0]} if tokenizers[0] else {}))


class IndexedWriter:
    """Writes a dataset document by document, each of one sequence.

    The files appear under their names, whole, when the `with` block ends well; else nothing is left of them. Until then
    memory grows by 4 bytes a document.

    Raises:
        UserError: the files cannot be made where they should be.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self._dtype = np.dtype(dtype)
        self._prefix = prefix
        self._sizes = array("i")
        self._paths = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
        self._asides = [aside_of(path) for path in self._paths]

    def __enter__(self) -> "IndexedWriter":
        with names_output(self._prefix):
            self._made = make_folder(self._paths[0].parent)
            for path in (*self._paths, Path(f"{self._prefix}.json")):
                remove_abandoned(path)
            self._file = self._asides[0].open("wb")
            mark_as_written(self._file)
        return self

    def add_document(self, ids: np.ndarray) -> None:
        """Append a document.

        Raises:
            ValueError: it is empty, or the dtype cannot hold one of its ids, which would come back as another.
        """
        if not len(ids):
            raise ValueError("a document has at least one id")
        least, most, limits = np.min(ids), np.max(ids), np.iinfo(self._dtype)
        if least < limits.min or most > limits.max:
            raise ValueError(f"ids from {least} to {most} do not fit {self._dtype}")
        with names_output(self._prefix):
            self._file.write(np.ascontiguousarray(ids, dtype=self._dtype).tobytes())
        self._sizes.append(len(ids))

    def __exit__(self, exception_type: type | None, *rest: object) -> None:
        try:
            if exception_type is None:
                with names_output(self._prefix):
                    to_disk(self._file)
                    self._write_index()
        finally:
            for aside in self._asides:
                aside.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # of a full disk, told already
                self._file.close()
            remove_empty(self._made)

    def _take_their_place(self) -> None:
        """Old index and manifest go first, so that they never stand beside ids that are not theirs."""
        for stale in (self._paths[1], Path(f"{self._prefix}.json")):
            stale.unlink(missing_ok=True)
        for aside, path in zip(self._asides, self._paths, strict=True):
            os.replace(aside, path)

    def _write_index(self) -> None:
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.zeros(0, np.int32)
        documents = len(sizes)
        with self._asides[1].open("wb") as file:
            mark_as_written(file)
            file.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[self._dtype], documents, documents + 1))
            file.write(sizes.astype("<i4").tobytes())
            file.write(pointers_of(sizes, self._dtype.itemsize).astype("<i8").tobytes())
            file.write(np.arange(documents + 1, dtype="<i8").tobytes())
            to_disk(file)
            self._take_their_place()  # while both are still marked as being written


def _read_header(path: Path) -> tuple[np.dtype, int]:
    """(dtype of the ids, number of sequences)."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise UserError(f"{path}: does not begin as a Megatron index does; it is another kind of file, or cut")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != _VERSION or code not in _DTYPES:
        raise UserError(f"{path}: version {version} with dtype code {code}; known are version 1 and codes {[*_DTYPES]}")
    length, promised = path.stat().st_size, _HEADER.size + sequences * (4 + 8) + max(1, boundaries) * 8
    if length != promised:
        raise UserError(
            f"{path}: has {length} bytes where its header promises {promised}; "
            "the file is cut or damaged, prepare the data again"
        )
    return np.dtype(_DTYPES[code]).newbyteorder("<"), sequences


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as an array that is read when touched; an empty file cannot be mapped."""
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
