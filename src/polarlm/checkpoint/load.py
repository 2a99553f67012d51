"""A run's weights alone: to start another run from, or to use."""

from pathlib import Path

import torch
from torch import nn

from polarlm.checkpoint import folders
from polarlm.checkpoint.completeness import fault_of
from polarlm.checkpoint.state import progress_in
from polarlm.checkpoint.weights import check_names, fill_weights, weights_of
from polarlm.config import ModelConfig, UserError, load_run_folder, run_of
from polarlm.model import Transformer
from polarlm.parallel import local_device


def check_weights(path: Path, config: ModelConfig) -> None:
    """Find out, without reading any, whether `load_weights` can fill a model of this shape.

    Raises:
        UserError: as `load_weights`.
    """
    with torch.device("meta"):
        model = Transformer(config)
    checkpoint = _checkpoint_at(path)
    with folders.staying(checkpoint):
        check_names(weights_of(model), checkpoint / "weights")


def load_weights(path: Path, model: nn.Module, alone: bool = False) -> None:
    """Fill a model's weights in place, on any layout; every rank calls, or one `alone` for a whole model.

    Args:
        path: a checkpoint, or a run folder, whose newest complete checkpoint is taken.

    Raises:
        UserError: no complete checkpoint is there, or its weights are of another model: the message lists the names.
    """
    checkpoint = _checkpoint_at(path, with_digests=True)
    with folders.staying(checkpoint):
        fill_weights(model, checkpoint / "weights", alone)


def load_model(run_folder: Path, step: int | None = None) -> Transformer:
    """A run's model after `step`, by default at its newest complete checkpoint: whole, on this process's device, and
    read by it alone.

    Returns:
        The model in evaluation mode.

    Raises:
        UserError: the folder holds no run, or no complete checkpoint of that step.
    """
    config = load_run_folder(run_folder)
    checkpoint = _newest(run_folder) if step is None else _of_step(run_folder, step)
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device=local_device(0).torch)
    with folders.staying(checkpoint):
        _check_model(run_folder, config.model, checkpoint)
        fill_weights(model, checkpoint / "weights", alone=True)
    return model.eval()


def _checkpoint_at(path: Path, with_digests: bool = False) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one of a run."""
    if (path / "checkpoints").is_dir():
        return _newest(path)
    if fault := fault_of(path, with_digests):
        raise UserError(f"{path}: not a run folder and not a complete checkpoint, {fault}; choose another")
    return path


def _check_model(run_folder: Path, model: ModelConfig, checkpoint: Path) -> None:
    """Refuse another model than the weights were trained as, though it may have as many: of another base or norm."""
    saved = progress_in(checkpoint).get("config")
    if saved is not None and run_of(saved, checkpoint).model.model_copy(update={"preset": model.preset}) != model:
        raise UserError(
            f"{run_folder / 'config.yaml'}: `model` is another than {checkpoint} was trained as; bring the old one back"
        )


def _of_step(run_folder: Path, step: int) -> Path:
    there = folders.steps(run_folder / "checkpoints")
    if step not in there:
        raise UserError(
            f"{run_folder}: no checkpoint of step {step} there; choose {' or '.join(map(str, there)) or 'another run'}"
        )
    return _checkpoint_at(folders.step_folder(run_folder / "checkpoints", step), with_digests=True)


def _newest(run_folder: Path) -> Path:
    folder = run_folder / "checkpoints"
    step = folders.newest_complete(folder)
    if step is None:
        raise UserError(f"{run_folder}: no complete checkpoint there; train it first, or choose another run")
    return folders.step_folder(folder, step)
