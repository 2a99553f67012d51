"""A run's weights alone: to start another run from, or to use."""

from pathlib import Path

import torch
from torch import nn

from polarlm.checkpoint import folders
from polarlm.checkpoint.completeness import fault_of
from polarlm.checkpoint.weights import fill_weights
from polarlm.config import UserError, load_run_folder
from polarlm.model import Transformer
from polarlm.parallel import local_device


def load_weights(path: Path, model: nn.Module, alone: bool = False) -> None:
    """Fill a model's weights in place, on any layout; every rank calls, or one `alone` for a whole model.

    Args:
        path: a checkpoint, or a run folder, whose newest complete checkpoint is taken.

    Raises:
        UserError: no complete checkpoint is there, or its weights are of another model: the message lists the names.
    """
    checkpoint = _newest(path) if (path / "checkpoints").is_dir() else path
    if fault := fault_of(checkpoint):
        raise UserError(f"{checkpoint}: not a run folder and not a complete checkpoint, {fault}; choose another")
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
    checkpoint = _newest(run_folder) if step is None else folders.step_folder(run_folder / "checkpoints", step)
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device=local_device(0).torch)
    load_weights(checkpoint, model, alone=True)
    return model.eval()


def _newest(run_folder: Path) -> Path:
    folder = run_folder / "checkpoints"
    step = folders.newest_complete(folder)
    if step is None:
        raise UserError(f"{run_folder}: no complete checkpoint there; train it first, or choose another run")
    return folders.step_folder(folder, step)
