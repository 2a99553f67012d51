"""The checkpoints in a run's folder: which there are, which to trust, which to keep.

`step-N` is a checkpoint, `.step-N.partial` one that is being written, `.step-N.discarded` one that is being deleted.
Each becomes the next by a rename, so that whoever looks sees a whole one or none. One process writes a folder.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from polarlm.checkpoint.completeness import fault_of, sync
from polarlm.config import UserError

_log = logging.getLogger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is written before it takes its place."""
    return folder / f".step-{step}.partial"


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint here, in order, complete or not."""
    return sorted(step for step, _ in _find(folder, "step-N"))


def newest_complete(folder: Path) -> int | None:
    """The highest step whose checkpoint is whole to the last byte; a warning tells of each one passed over."""
    # A partial one of the same step is the later of the two.
    candidates = [*_find(folder, "step-N"), *_find(folder, ".step-N.partial")]
    for step, path in sorted(candidates, reverse=True, key=lambda candidate: candidate[0]):
        is_partial = path == partial_folder(folder, step)
        fault = "its saving was interrupted" if is_partial else fault_of(path, with_digests=True)
        if fault is None:
            return step
        if not path.is_dir():  # the run that trains has a newer one by now, or has given this one its name
            return newest_complete(folder)
        _log.warning("%s: passed over, %s", path, fault)
    return None


@contextmanager
def staying(path: Path) -> Iterator[None]:
    """Read a checkpoint that a run may delete meanwhile.

    Raises:
        UserError: it has gone, whatever the reader made of that.
    """
    try:
        yield
    except (Exception, CheckpointException):
        if path.is_dir():
            raise
        raise UserError(
            f"{path}: has gone while it was read, for a run that trains deletes its older checkpoints; try again, or "
            "let it keep more of them (checkpoint.keep_last)"
        ) from None


def finish_interrupted(folder: Path) -> None:
    """Put in place what was whole when its process was killed, but had not yet its name."""
    for step, path in _find(folder, ".step-N.partial"):
        if fault_of(path) is None:
            put_in_place(folder, step)


def put_in_place(folder: Path, step: int) -> None:
    """Let the partial folder of a step, which is complete, be its checkpoint, whatever was there before."""
    final = step_folder(folder, step)
    if final.exists():
        _set_aside(final)
    os.rename(partial_folder(folder, step), final)
    sync(folder)
    aside = folder / f".latest-{os.getpid()}"
    aside.unlink(missing_ok=True)
    aside.symlink_to(final.name)
    os.replace(aside, folder / "latest")


def keep_newest(folder: Path, written: int, keep_last: int) -> None:
    """Delete what is no longer needed once the checkpoint of step `written` is complete.

    The `keep_last` newest complete ones up to `written` stay. So do damaged ones, which count for nothing, and higher
    steps, which this run has not written; what an interruption left half-written or half-deleted goes.
    """
    complete = [(step, path) for step, path in _find(folder, "step-N") if step <= written and fault_of(path) is None]
    delete(folder, [step for step, _ in sorted(complete)[:-keep_last]])
    for _, path in _find(folder, ".step-N.partial"):
        shutil.rmtree(path)


def delete(folder: Path, doomed: Iterable[int]) -> None:
    """Delete the checkpoints of these steps, and what an interruption left half-deleted."""
    for step in doomed:
        _set_aside(step_folder(folder, step))
    for _, path in _find(folder, ".step-N.discarded"):
        shutil.rmtree(path)


def _set_aside(path: Path) -> None:
    """Take a checkpoint's name away, all at once; `delete` does the rest."""
    aside = path.with_name(f".{path.name}.discarded")
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)


def _find(folder: Path, name: str) -> list[tuple[int, Path]]:
    """Folders of a name with a step for its N, each with its step; `step-007` and other foreign names are none, nor is
    a link, which could lead anywhere."""
    pattern = re.escape(name).replace("N", "(0|[1-9][0-9]*)")
    matches = ((re.fullmatch(pattern, path.name), path) for path in folder.glob("*"))
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir() and not path.is_symlink()]
