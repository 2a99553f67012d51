"""From files to documents: which files there are, and how each is cut into raw documents and read as text."""

import codecs
import gzip
import hashlib
import importlib
import io
import json
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.config import UserError

STDLIB = "stdlib"  # the input that is always there: the running Python's own library
_WHOLE_FILE = (".txt", ".md", ".py", ".rst")
_LINE_BY_LINE = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ROW_BY_ROW = (".parquet",)
_KINDS = (*_WHOLE_FILE, *_LINE_BY_LINE, *_ROW_BY_ROW)
_ZSTANDARD_BYTES = 1 << 14  # compressed, read at a time: what they hold may be many times more
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """A file to read documents from."""

    path: Path
    skips_bad: bool = False  # a file that is not UTF-8 is left out, whatever the user says of bad lines


@dataclass(frozen=True)
class RawDocument:
    """A document's bytes, and where they are from: `file`, or `file:line`."""

    origin: str
    content: bytes
    is_json: bool
    skips_bad: bool


class BadDocument(Exception):
    """A document that is not what it should be; the message is `file:line: what is wrong`."""


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The files of the inputs, in a fixed order: as given, folders sorted.

    The library's files come in a pseudo-random order instead, so that any contiguous part of it is a fair sample.

    Raises:
        UserError: an input is not there, is of no known kind, or holds no file of one.
    """
    return [source for one in inputs for source in _sources_of(one)]


def _sources_of(one: str) -> list[Source]:
    if one == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if not _NOT_LIBRARY.intersection(path.parts)]
        names = {path: path.relative_to(root).as_posix() for path in files}
        files.sort(key=lambda path: hashlib.sha256(names[path].encode()).digest())
        return [Source(path, skips_bad=True) for path in files]
    path = Path(one)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.endswith(_KINDS) and file.is_file())
        if not found:
            raise UserError(f"{path}: no file in this folder ends in {', '.join(_KINDS)}")
        return [Source(file) for file in found]
    if not path.is_file():
        raise UserError(f"{path}: no such file or folder; give text, or `{STDLIB}` for Python's own library")
    if not path.name.endswith(_KINDS):
        raise UserError(f"{path}: files that end in {', '.join(_KINDS)} can be read; rename or convert it")
    return [Source(path)]


def read_raw(sources: Iterable[Source], text_key: str = "text") -> Iterator[RawDocument]:
    """The documents of files, unread: a whole file, each line, which only a line feed ends, or each row's text.

    Raises:
        UserError: a file cannot be read.
    """
    for source in sources:
        try:
            yield from _documents_of(source, text_key)
        except _damage_of(source.path) as error:
            raise UserError(f"{source.path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _documents_of(source: Source, text_key: str) -> Iterator[RawDocument]:
    if source.path.name.endswith(_ROW_BY_ROW):
        yield from _rows_of(source.path, text_key)
        return
    with _open(source.path) as file:
        if file.peek(3).startswith(codecs.BOM_UTF8):  # a mark of the encoding, no part of the text
            file.read(3)
        if source.path.name.endswith(_WHOLE_FILE):
            yield RawDocument(str(source.path), file.read(), False, source.skips_bad)
            return
        for number, line in enumerate(file, start=1):  # in binary, so that U+2028 and its like stay inside their line
            yield RawDocument(f"{source.path}:{number}", line, True, source.skips_bad)


def _damage_of(path: Path) -> tuple[type[Exception], ...]:
    """What reading a file raises where it cannot be read, or is cut or damaged."""
    own = (_optional("zstandard", path).ZstdError,) if path.suffix == ".zst" else ()
    return (OSError, EOFError, zlib.error, *own)


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    """A file's bytes, decompressed."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(path))
    return path.open("rb")


class _ZstandardFile(io.RawIOBase):
    """A `.zst` file decompressed, frame by frame; the library's own reader takes a file that is cut for a whole one."""

    def __init__(self, path: Path) -> None:
        # Long windows too, as of `zstd --long=31`.
        self._decompressor = _optional("zstandard", path).ZstdDecompressor(max_window_size=2**31)
        self._file = path.open("rb")
        self._frame: Any = None  # that is being read
        self._read, self._decompressed = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            self._read = self._read or self._file.read(_ZSTANDARD_BYTES)
            if not self._read:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._decompressed = memoryview(self._frame.decompress(self._read))
            self._read = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        taken = self._decompressed[: len(buffer)]
        buffer[: len(taken)] = taken
        self._decompressed = self._decompressed[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()


def _rows_of(path: Path, text_key: str) -> Iterator[RawDocument]:
    parquet = _optional("pyarrow.parquet", path)
    lib = _optional("pyarrow", path)
    try:
        table = parquet.ParquetFile(path)
        if text_key not in table.schema_arrow.names:
            raise UserError(
                f"{path}: has no column {text_key!r}, but {', '.join(table.schema_arrow.names)}; --text-key"
            )
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                row += 1
                if not isinstance(text, str | bytes | None):
                    kind = table.schema_arrow.field(text_key).type
                    raise UserError(f"{path}: its column {text_key!r} holds {kind}, not text; --text-key")
                content = text.encode() if isinstance(text, str) else (text or b"")
                yield RawDocument(f"{path}:{row}", content, False, False)
    except lib.ArrowException as error:
        raise UserError(f"{path}: is not a Parquet file that can be read ({error})") from None


def _optional(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{path}: reading it takes {package}; pip install 'polarlm[data]'") from None


def read_text(raw: RawDocument, text_key: str) -> str:
    """The text of a document; empty for an empty one and for a blank line.

    Raises:
        BadDocument: not UTF-8, not JSON, or no text under `text_key`.
    """
    try:
        text = raw.content.decode()
    except UnicodeDecodeError as error:
        raise BadDocument(f"{raw.origin}: byte {error.start} is not UTF-8 (0x{raw.content[error.start]:02x})") from None
    if not raw.is_json:
        return text
    if not text.strip():
        return ""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadDocument(f"{raw.origin}: not JSON ({error})") from None
    found = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(found, str):
        raise BadDocument(f"{raw.origin}: no text under the key {text_key!r}; name another with --text-key")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise BadDocument(f"{raw.origin}: half of a surrogate pair, which is no character") from None
    return found


def read_texts(inputs: Sequence[str], text_key: str = "text", bad_lines: str = "error") -> Iterator[str]:
    """All the documents' texts, one after the other, without the empty ones.

    Raises:
        UserError: a bad document, unless `bad_lines` is `skip`; or no text at all.
    """
    any_text = False
    for raw in read_raw(find_sources(inputs), text_key):
        try:
            text = read_text(raw, text_key)
        except BadDocument as error:
            if raw.skips_bad or bad_lines == "skip":
                continue
            raise UserError(f"{error}; or leave such out with --bad-lines skip") from None
        if text:
            any_text = True
            yield text
    if not any_text:
        raise UserError(f"{', '.join(inputs)}: no text in there")
