"""What a shard's header says, believed only where the file bears it out.

A safetensors file is a u64 length, little-endian, a JSON header of that length, and the tensors' bytes, one after the
other: the header gives each its dtype, shape and place. Ours say besides at which index of the whole tensor each piece
begins (`DCP_SHARDING_INFO`); a header without that holds whole tensors.
"""

import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from polarlm.config import UserError, check_inside, names_file, parse_json

MOST_HEADER_BYTES = 2**25
_LENGTH = struct.Struct("<Q")
_METADATA, _PIECES, _BEGIN = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
# The format's names of what a checkpoint may hold.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_DIMS = 8


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, or all of it, as one shard holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: tuple[int, ...]  # index in the whole tensor

    @property
    def end(self) -> tuple[int, ...]:
        """The index after its last, on each dim."""
        return tuple(begin + size for begin, size in zip(self.begin, self.shape, strict=True))


def read_headers(folder: Path) -> dict[str, list[Piece]]:
    """The pieces of every tensor in a folder of shards, which together are the whole of each.

    Raises:
        UserError: a shard's header is damaged or leads beyond its file; or pieces overlap, leave a gap, or are of
            different types.
    """
    pieces: dict[str, list[Piece]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        check_inside(path, folder)
        for name, piece in read_header(path).items():
            pieces.setdefault(name, []).append(piece)
    for name, those in pieces.items():
        if fault := _fault_of(those):
            raise UserError(f"{folder}: the pieces of {name} {fault}; the checkpoint is damaged, choose another")
    return pieces


def whole_shape(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """The shape of the tensor that pieces, one at least, make together."""
    return tuple(max(ends) for ends in zip(*(piece.end for piece in pieces), strict=True))


def read_header(path: Path) -> dict[str, Piece]:
    """What one shard holds, by its tensors' names.

    Raises:
        UserError: the header is damaged, or is not borne out by the file.
    """
    if not path.is_file():
        raise UserError(f"{path}: is no regular file; the checkpoint is damaged, choose another")
    try:
        with names_file(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
            if length > min(size - _LENGTH.size, MOST_HEADER_BYTES):
                raise ValueError(f"it promises {length} bytes of header, in a file of {size}")
            header = parse_json(file.read(length))
        return _pieces_of(header, size - _LENGTH.size - length)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else "something is missing there, or of another kind"
        raise UserError(f"{path}: its header is damaged ({reason}); choose another checkpoint") from None


def _pieces_of(header: dict[str, Any], data_bytes: int) -> dict[str, Piece]:
    begins = _begins_of(header.pop(_METADATA, {}))
    pieces = {name: _piece_of(name, entry, begins) for name, entry in header.items()}
    places = sorted(_place_of(name, entry, pieces[name]) for name, entry in header.items())
    ends = [0, *(stop for _, stop in places)]
    if [start for start, _ in places] != ends[:-1] or ends[-1] != data_bytes:
        raise ValueError(f"its tensors do not lie one after the other in the {data_bytes} bytes that follow it")
    return pieces


def _begins_of(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Where each piece begins, by name; None where every tensor is whole."""
    described = metadata.get(_PIECES)
    return None if described is None else parse_json(described)


def _piece_of(name: str, entry: Mapping[str, Any], begins: Mapping[str, Any] | None) -> Piece:
    shape = _indices(entry["shape"])
    begin = (0,) * len(shape) if begins is None else _indices(begins[name][_BEGIN])
    if len(begin) != len(shape) or len(shape) > _MOST_DIMS:
        raise ValueError(f"{name} has {len(shape)} dims, and begins at an index of {len(begin)}")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} is of a type that no checkpoint holds")
    return Piece(DTYPES[entry["dtype"]], shape, begin)


def _indices(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**62 for each in value):
        raise TypeError
    return tuple(value)


def _place_of(name: str, entry: Mapping[str, Any], piece: Piece) -> tuple[int, int]:
    """(first byte, the byte after the last), among the tensors' bytes."""
    start, stop = _indices(entry["data_offsets"])
    needed = math.prod(piece.shape) * piece.dtype.itemsize
    if stop - start != needed:
        raise ValueError(f"{name} takes {needed} bytes, and is said to have {stop - start}")
    return start, stop


def _fault_of(pieces: list[Piece]) -> str | None:
    """What is wrong with the pieces as one tensor.

    Boxes fill a larger one, without gap or overlap, where the corners inside cancel: every box counts 1 at its first
    corner, and so on with a sign that turns along each edge. That is the mixed difference of how often each index is
    covered, and only one cover has the difference of the whole.
    """
    if len({(piece.dtype, len(piece.shape)) for piece in pieces}) > 1:
        return "are of different types"
    whole = whole_shape(pieces)
    if _corners((piece.begin, piece.end) for piece in pieces) != _corners([((0,) * len(whole), whole)]):
        return "overlap, or leave a gap"
    return None


def _corners(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[tuple[int, ...], int]:
    """The signed corners of boxes, (begin, end) each, but those that cancel."""
    count: Counter[tuple[int, ...]] = Counter()
    for begin, end in boxes:
        for upper in product((0, 1), repeat=len(begin)):
            count[tuple(map(_pick, begin, end, upper))] += (-1) ** sum(upper)
    return {corner: sign for corner, sign in count.items() if sign}


def _pick(begin: int, end: int, upper: int) -> int:
    return end if upper else begin
