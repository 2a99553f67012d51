"""`state.json`: how far a run has come, and its optimizer's numbers; believed only where it has the types it should."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from polarlm.checkpoint.completeness import STATE
from polarlm.config import Record, UserError, read_json

_SAYS = {"what": "what a checkpoint says of its run", "mend": "choose another checkpoint"}
_Plain = float | int | bool | None


class _Number(Record):
    """A tensor of no dims."""

    number: Annotated[float | int, Field(ge=0)] | bool  # a count, or a product of decays
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class _Group(Record):
    parameters: list[str]
    numbers: dict[str, float | int | list[float | int]]


class _Optimizer(Record):
    scalars: dict[str, dict[str, _Number | _Plain]]
    groups: list[_Group]


class _Versioned(Record):
    format: Annotated[int, Field(ge=1)]


class _State(_Versioned):
    progress: dict[str, Any]
    optimizer: _Optimizer


def read_state(folder: Path, known_format: int) -> dict[str, Any]:
    """What a checkpoint says besides its tensors: `format`, `progress`, `optimizer`.

    Raises:
        UserError: it is not there or damaged, or a later PolarLM wrote it.
    """
    path = folder / STATE
    try:
        version = read_json(path, _Versioned, **_SAYS)["format"]
        if version > known_format:
            raise UserError(f"{folder}: written by a later PolarLM (format {version}); update to read it")
        return read_json(path, _State, **_SAYS)
    except FileNotFoundError:
        raise UserError(f"{path}: is not there; choose another checkpoint") from None


def progress_in(folder: Path) -> dict[str, Any]:
    """The progress alone, to show; empty where it cannot be read."""
    try:
        progress = read_json(folder / STATE, **_SAYS)["progress"]
    except (OSError, UserError, KeyError, TypeError):
        return {}
    return progress if isinstance(progress, dict) else {}
