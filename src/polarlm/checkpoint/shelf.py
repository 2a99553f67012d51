"""The checkpoints of a run seen from outside: which there are, which to keep, their weights in one plain file."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from polarlm.checkpoint import folders
from polarlm.checkpoint.completeness import fault_of
from polarlm.checkpoint.state import progress_in
from polarlm.checkpoint.tensors import Stored, list_tensors, read_tensors
from polarlm.config import ParallelConfig, UserError

_LOOKS = 10  # at checkpoints that go while one looks, before there are none


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a run."""

    step: int
    folder: Path
    bytes: int
    fault: str | None  # why it is not to be trusted
    progress: dict[str, Any]  # as it was saved; empty where it cannot be read

    @property
    def layout(self) -> str:
        """The ranks and the axes that it was saved under, such as `4 ranks: tensor 2, zero 3`."""
        try:
            parallel = ParallelConfig.model_validate(self.progress["config"]["parallel"])
        except (KeyError, TypeError, ValueError):
            return "unknown"
        axes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
        parts = [f"{axis} {degree}" for axis, degree in axes.items() if degree > 1]
        parts += [f"zero {parallel.zero_stage}"] if parallel.zero_stage else []
        ranks = "1 rank" if parallel.ranks == 1 else f"{parallel.ranks} ranks"
        return f"{ranks}: {', '.join(parts)}" if parts else ranks


def saved_checkpoints(run_folder: Path, *, with_digests: bool = False) -> list[Saved]:
    """All checkpoints of a run in order, complete or not.

    Args:
        with_digests: read every byte of them, to find what has changed since.

    Raises:
        UserError: the folder is no run's.
    """
    shelf = run_folder / "checkpoints"
    if not run_folder.is_dir():
        raise UserError(f"{run_folder}: no such folder; name a run")
    if not (shelf.is_dir() or (run_folder / "config.yaml").exists()):
        raise UserError(f"{run_folder}: neither config.yaml nor checkpoints there, so this is not a run folder")
    for _ in range(_LOOKS):
        looked = [_look_at(step, folders.step_folder(shelf, step), with_digests) for step in folders.steps(shelf)]
        there = [saved for saved in looked if saved is not None]
        if there or not looked:
            break
    return there


def prune(run_folder: Path, keeps: Callable[[Saved], bool], *, dry_run: bool = False) -> list[Saved]:
    """Delete the complete checkpoints that `keeps` does not keep, but never the newest of them; return those deleted.

    That one is read to its last byte, and so are those before it until one is as it was written: sizes alone would let
    the last good one go. Damaged ones stay: whoever wants to look at what went wrong can.
    """
    shelf = run_folder / "checkpoints"
    complete = [each for each in saved_checkpoints(run_folder) if each.fault is None]
    newest = folders.newest_complete(shelf)
    doomed = [each for each in complete if each.step < (newest or 0) and not keeps(each)]
    if not dry_run:
        folders.delete(shelf, [each.step for each in doomed])
    return doomed


def export_weights(checkpoints: Sequence[Path], file: Path) -> int:
    """Write the weights of a checkpoint, or the mean of several, as one safetensors file; return its parameters.

    Means are taken in fp32, and kept in the type of the first (weight averaging, arXiv 1803.05407).

    Raises:
        UserError: the file cannot be written, or a checkpoint is not as it was written or of another model.
    """
    aside = _aside(file, checkpoints)
    for folder in checkpoints:
        if fault := fault_of(folder, with_digests=True):
            raise UserError(f"{folder}: not to be used, {fault}; choose another --step")
    stored = [_stored_in(folder) for folder in checkpoints]
    for folder, other in zip(checkpoints, stored, strict=True):
        if {name: each.shape for name, each in other.items()} != {n: each.shape for n, each in stored[0].items()}:
            raise UserError(f"{folder}: its weights are of another model than {checkpoints[0]}'s; average one run's")
    weights = {name: torch.zeros(each.shape) for name, each in stored[0].items()}
    for folder in checkpoints:
        for name, tensor in _whole_weights(folder).items():
            weights[name] += tensor / len(checkpoints)
    _write({name: tensor.to(stored[0][name].dtype) for name, tensor in weights.items()}, aside, file)
    return sum(tensor.numel() for tensor in weights.values())


def _stored_in(folder: Path) -> dict[str, Stored]:
    with folders.staying(folder):
        return list_tensors(folder / "weights")


def _whole_weights(folder: Path) -> dict[str, Tensor]:
    tensors = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in _stored_in(folder).items()}
    with folders.staying(folder):
        read_tensors(tensors, folder / "weights", alone=True)
    return tensors


def _aside(file: Path, checkpoints: Sequence[Path]) -> Path:
    """Where the file is written before it takes its name.

    Raises:
        UserError: it has no name, its folder is not there, or it would spoil a checkpoint.
    """
    if file.is_dir() or not file.name:
        raise UserError(f"--output: {str(file)!r} is a folder; name a file, such as model.safetensors")
    if not file.parent.is_dir():
        raise UserError(f"--output: there is no folder {file.parent}; make it, or name another")
    if any(folder.parent.resolve() in file.resolve().parents for folder in checkpoints):
        raise UserError(f"--output: {file} is among the checkpoints, which hold what a run saves alone; name another")
    return file.with_name(f".{file.name}.{os.getpid()}.partial")


def _write(tensors: dict[str, Tensor], aside: Path, file: Path) -> None:
    try:
        save_file(tensors, aside)
        os.replace(aside, file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be written ({error}); choose another --output") from None
    finally:
        aside.unlink(missing_ok=True)


def _look_at(step: int, folder: Path, with_digests: bool) -> Saved | None:
    """None where it has gone meanwhile: a run that trains deletes its old ones."""
    try:
        files = (path for path in folder.rglob("*") if path.is_file())
        saved = Saved(step, folder, _total(files), fault_of(folder, with_digests), progress_in(folder))
    except FileNotFoundError:
        return None
    return saved if folder.is_dir() else None


def _total(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)
