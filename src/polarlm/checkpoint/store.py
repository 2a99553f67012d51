"""The checkpoints of one run: saved and loaded by all its ranks together."""

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from polarlm.checkpoint import folders
from polarlm.checkpoint.completeness import STATE, fault_of, mark_complete, write_json
from polarlm.checkpoint.optimizer import fill_optimizer, make_state, take_optimizer
from polarlm.checkpoint.state import read_state
from polarlm.checkpoint.tensors import write_tensors
from polarlm.checkpoint.weights import fill_weights, weights_of
from polarlm.config import UserError
from polarlm.parallel import World

FORMAT = 1  # raised when an older PolarLM could not read what this one writes


class Checkpoints:
    """The folder of a run's checkpoints, which this run alone writes.

    Every method is called by every rank, and gives or raises the same on each.
    """

    def __init__(self, folder: Path, keep_last: int, world: World) -> None:
        """
        Args:
            folder: made at the first save.
            keep_last: how many of the newest complete checkpoints a save leaves, at least 1.
        """
        assert keep_last >= 1, "a run keeps at least its last checkpoint"
        self.folder = folder
        self.keep_last = keep_last
        self.world = world
        if world.is_first:
            folders.finish_interrupted(folder)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, and then delete older ones; killed at any moment, it leaves a complete one.

        Args:
            progress: how far the run has come, in what JSON can say; `progress` and `load` give it back.

        Raises:
            UserError: the disk is full, or cannot be written otherwise; then nothing is left of this one.
        """
        partial = folders.partial_folder(self.folder, step)
        try:
            self._save(step, partial, model, optimizer, progress)
        except (OSError, CheckpointException) as error:
            reason = _why_unwritten(error)
            if reason is None:
                raise
            if self.world.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            before = [str(other) for other in folders.steps(self.folder) if other < step]
            raise UserError(
                f"{self.folder}: step {step} cannot be saved ({reason}); mend that, and go on with --resume from "
                f"{f'step {before[-1]}' if before else 'the beginning'}"
            ) from None

    def _save(self, step: int, partial: Path, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
        if self.world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.world.barrier()
        arrays, record = take_optimizer(optimizer, model)
        write_tensors(weights_of(model), partial / "weights")
        write_tensors(arrays, partial / "optimizer")
        if self.world.is_first:
            write_json({"format": FORMAT, "progress": progress, "optimizer": record}, partial / STATE)
            mark_complete(partial)
            folders.put_in_place(self.folder, step)
            folders.keep_newest(self.folder, step, self.keep_last)
        self.world.barrier()

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint; a warning tells of each one that was passed over, and why."""
        return self.world.from_first(folders.newest_complete(self.folder) if self.world.is_first else None)

    def progress(self, step: int) -> dict[str, Any]:
        """What `save` was told of the run's progress.

        Raises:
            UserError: that checkpoint is not complete, or a later PolarLM wrote it.
        """
        return self._state(step)["progress"]

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Fill the model and the optimizer in place, under whatever layout they were saved, and return the progress.

        Raises:
            UserError: as `progress`; or the model or the optimizer has other parameters than the saved ones.
        """
        state, folder = self._state(step), folders.step_folder(self.folder, step)
        make_state(optimizer)
        fill_weights(model, folder / "weights")
        fill_optimizer(optimizer, model, folder / "optimizer", state["optimizer"])
        return state["progress"]

    def _state(self, step: int) -> dict[str, Any]:
        folder = folders.step_folder(self.folder, step)
        fault = self.world.from_first(fault_of(folder) if self.world.is_first else None)
        if fault is not None:
            raise UserError(f"{folder}: not a complete checkpoint, {fault}; choose another step")
        return read_state(folder, FORMAT)


def _why_unwritten(error: BaseException) -> str | None:
    """What the system said to a rank that could not write; None where it was anything else that went wrong."""
    faults = [fault for fault, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return next((fault.strerror for fault in faults if isinstance(fault, OSError)), None)
