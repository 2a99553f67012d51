"""A model's weights under names that no layout changes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polarlm.checkpoint.tensors import list_tensors, read_tensors
from polarlm.config import UserError

_LISTED = 10  # names of one kind in a message


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """The name that each of the model's own tensors is saved under, the same on every layout.

    What several modules share, such as a tied head, is one tensor with its first name; a pipeline stage's copy of
    another's parameter goes by that one's name.
    """
    copies = getattr(model, "copies", {})
    # Asked for its state, a sharded model first puts back the parts that a forward pass has gathered.
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, copies.get(name, name))
    return names


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors on this rank by name; of two alike, the first."""
    weights: dict[str, Tensor] = {}
    for tensor, name in names_of(model).items():
        weights.setdefault(name, tensor)
    return weights


def fill_weights(model: nn.Module, folder: Path, alone: bool = False) -> None:
    """Fill the model's weights in place from a folder of shards; every rank calls, or one `alone` for a whole model.

    Raises:
        UserError: names that are missing there, that the model lacks, or of another shape; then nothing is filled.
    """
    weights = weights_of(model)
    check_names(weights, folder, alone)
    read_tensors(weights, folder, alone)
    with torch.no_grad():
        for tensor, name in names_of(model).items():
            if tensor is not weights[name]:
                tensor.copy_(weights[name])


def check_names(weights: Mapping[str, Tensor], folder: Path, alone: bool = False) -> None:
    """Compare names and shapes, all ranks' together, with those in a folder of shards.

    Raises:
        UserError: names that are missing there, that the model lacks, or of another shape.
    """
    stored = list_tensors(folder)
    shapes = gather_named({name: tensor.shape for name, tensor in weights.items()}, alone)
    integers = [name for name, each in stored.items() if not each.dtype.is_floating_point]
    faults = {
        "of whole numbers": [name for name in integers if name in weights and weights[name].is_floating_point()],
        "missing": [name for name in shapes if name not in stored],
        "not in the model": [name for name in stored if name not in shapes],
        "of another shape": [
            f"{name} ({_times(stored[name].shape)}, in the model {_times(shape)})"
            for name, shape in shapes.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    if any(faults.values()):
        lists = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)
        raise UserError(
            f"{folder}: the weights of another model ({lists}); set `model` to the one they were trained as"
        )


def gather_named(mine: Mapping[str, Any], alone: bool = False) -> dict[str, Any]:
    """What each rank has by name, of all ranks together: with a pipeline none has everything."""
    if alone or not dist.is_initialized():
        return dict(mine)
    everyones: list[Mapping[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, dict(mine))
    return {name: value for each in everyones for name, value in each.items()}


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first few, and how many more."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _times(shape: Iterable[int]) -> str:
    return "×".join(str(size) for size in shape) or "1"
