"""The checkpoints of one run: saved and loaded by all its ranks together."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from polarlm.checkpoint import folders
from polarlm.checkpoint.completeness import STATE, digest_of, fault_of, mark_complete, write_json
from polarlm.checkpoint.optimizer import fill_optimizer, make_state, record_of, take_optimizer
from polarlm.checkpoint.staging import Staging
from polarlm.checkpoint.state import read_state
from polarlm.checkpoint.tensors import local_part, write_tensors
from polarlm.checkpoint.weights import fill_weights, weights_of
from polarlm.config import UserError
from polarlm.parallel import World

FORMAT = 1  # raised when an older PolarLM could not read what this one writes


class Checkpoints:
    """The folder of a run's checkpoints, which this run alone writes.

    Every method but `completed` is called by every rank, and gives or raises the same on each.

    Attributes:
        failed: what is being written in the background cannot be; `wait` says why.
    """

    def __init__(self, folder: Path, keep_last: int, world: World, in_background: bool = False) -> None:
        """
        Args:
            folder: made at the first save.
            keep_last: how many of the newest complete checkpoints a save leaves, at least 1.
            in_background: `save` returns when it has copied what is to be written, and does not wait for the disk.
        """
        assert keep_last >= 1, "a run keeps at least its last checkpoint"
        self.folder = folder
        self.keep_last = keep_last
        self.world = world
        self._writers = world.apart()
        self._staging = {part: Staging() for part in ("weights", "optimizer")} if in_background else None
        self._writing: Thread | None = None
        self._failure: Exception | None = None
        self._completed: list[int] = []
        if world.is_first:
            folders.finish_interrupted(folder)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, progress: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, and then delete older ones; killed at any moment, it leaves a complete one.

        In the background the model and the optimizer are free to go on when this returns; a save that is still being
        written is waited for first.

        Args:
            progress: how far the run has come, in what JSON can say; `progress` and `load` give it back.

        Raises:
            UserError: the disk is full, or cannot be written otherwise; then nothing is left of this one. In the
                background, of the one before.
        """
        self.wait()
        arrays, numbers = take_optimizer(optimizer, model)
        tensors = {"weights": weights_of(model), "optimizer": arrays}
        if self._staging is None:
            parts = {part: {name: local_part(each) for name, each in own.items()} for part, own in tensors.items()}
            self._write(step, tensors, parts, numbers, progress)
            return
        tensors = {part: staging.share_of(tensors[part]) for part, staging in self._staging.items()}
        parts = {part: staging.copy(tensors[part]) for part, staging in self._staging.items()}
        # As a daemon it holds no process back that ends for another reason; what is half-written counts for nothing.
        self._writing = Thread(target=self._try_to_write, args=(step, tensors, parts, numbers, progress), daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until what is written in the background is safely there.

        Raises:
            UserError: as `save`, of the one that was being written.
        """
        if self._writing is None:
            return
        self._writing.join()
        failure, self._writing, self._failure = self._failure, None, None
        if failure is not None:
            raise failure

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def completed(self) -> list[int]:
        """The steps whose checkpoint has become complete since this was last asked."""
        # One by one, since a save behind may add to the list meanwhile.
        return [self._completed.pop(0) for _ in range(len(self._completed))]

    def _try_to_write(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except Exception as error:  # raised again where the thread that trains asks
            self._failure = error

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        parts: Mapping[str, Mapping[str, Tensor]],
        numbers: dict[str, Any],
        progress: dict[str, Any],
    ) -> None:
        partial = folders.partial_folder(self.folder, step)
        try:
            self._on_first(lambda: _make_empty(partial))
            digests: dict[str, str] = {}
            for part in tensors:
                shards = write_tensors(tensors[part], parts[part], partial / part, self._writers.group)
                digests |= {f"{part}/{file.name}": file.sha256 for file in shards.files}
                if self._staging is not None:
                    self._staging[part].wrote(shards.names)
            record = record_of(self._writers.gather(numbers))
            state = {"format": FORMAT, "progress": progress, "optimizer": record}
            self._on_first(lambda: self._complete(step, partial, state, digests))
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
        self._completed.append(step)

    def _complete(self, step: int, partial: Path, state: dict[str, Any], digests: dict[str, str]) -> None:
        write_json(state, partial / STATE)
        mark_complete(partial, digests | {STATE: digest_of(partial / STATE)})
        folders.put_in_place(self.folder, step)
        folders.keep_newest(self.folder, step, self.keep_last)

    def _on_first(self, action: Callable[[], None]) -> None:
        """Let the first rank do something with files; what stops it there is raised on every rank."""
        failure: object = None
        if self.world.is_first:
            try:
                action()
            except OSError as error:
                failure = error
        if isinstance(failure := self._writers.from_first(failure), OSError):
            raise failure

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint; a warning tells of each one that was passed over, and why.

        Raises:
            UserError: as `wait`.
        """
        self.wait()
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


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)  # but not the run's folder: where that has gone, a checkpoint alone is no run
    folder.mkdir()


def _why_unwritten(error: BaseException) -> str | None:
    """What the system said to a rank that could not write; None where it was anything else that went wrong."""
    faults = [fault for fault, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return next((fault.strerror for fault in faults if isinstance(fault, OSError)), None)
