"""A model's weights under names that no layout changes."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from polarlm.checkpoint.tensors import list_tensors, read_tensors
from polarlm.config import UserError

_LISTED = 10  # names of one kind in a message


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own tensors by name; one that several modules share, such as a tied head, under its first name."""
    # Asked for its state, a sharded model first puts back the parts that a forward pass has gathered.
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def fill_weights(model: nn.Module, folder: Path, alone: bool = False) -> None:
    """Fill the model's weights in place from a folder of shards; every rank calls, or one `alone` for a whole model.

    Raises:
        UserError: names that are missing there, that the model lacks, or of another shape; then nothing is filled.
    """
    weights = weights_of(model)
    check_names(weights, folder)
    read_tensors(weights, folder, alone)


def check_names(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Compare names and shapes with those in a folder of shards.

    Raises:
        UserError: names that are missing there, that the model lacks, or of another shape.
    """
    stored = list_tensors(folder)
    faults = {
        "missing": [name for name in weights if name not in stored],
        "not in the model": [name for name in stored if name not in weights],
        "of another shape": [
            f"{name} ({_times(stored[name].shape)}, in the model {_times(tensor.shape)})"
            for name, tensor in weights.items()
            if name in stored and stored[name].shape != tensor.shape
        ],
    }
    if any(faults.values()):
        lists = "; ".join(f"{kind}: {listed(names)}" for kind, names in faults.items() if names)
        raise UserError(
            f"{folder}: the weights of another model ({lists}); set `model` to the one they were trained as"
        )


def listed(names: Sequence[str]) -> str:
    """Names for a message: the first few, and how many more."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _times(shape: Iterable[int]) -> str:
    return "×".join(str(size) for size in shape) or "1"
