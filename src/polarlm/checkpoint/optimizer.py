"""An optimizer's state by parameter name: arrays as tensors, single numbers as JSON.

Any optimizer will do that keeps its state by parameter in `optimizer.state`, as PyTorch's own do.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polarlm.checkpoint.tensors import list_tensors, read_tensors
from polarlm.checkpoint.weights import listed, weights_of
from polarlm.config import UserError


def take_optimizer(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as it is saved: its arrays, named `<parameter>.<key>`, and a record for JSON.

    The record holds `scalars`, the state's single numbers by parameter and key, and `groups`, the parameters and the
    numbers (learning rate, betas, ...) of each. A group's switches, such as `fused`, belong to the machine and stay.
    """
    names = {tensor: name for name, tensor in weights_of(model).items()}
    arrays: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        arrays |= {f"{name}.{key}": value for key, value in state.items() if _is_array(value)}
        scalars[name] = {key: _to_json(value) for key, value in state.items() if not _is_array(value)}
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "numbers": {key: value for key, value in group.items() if _is_number(value)},
        }
        for group in optimizer.param_groups
    ]
    return arrays, {"scalars": scalars, "groups": groups}


def fill_optimizer(optimizer: Optimizer, model: nn.Module, folder: Path, record: Mapping[str, Any]) -> None:
    """Give the optimizer the state that `take_optimizer` took, under whatever layout that was; every rank calls.

    Args:
        folder: the shards of its arrays.
        record: its record.

    Raises:
        UserError: the optimizer has parameters that the saved one had not, or lacks some.
    """
    names = {tensor: name for name, tensor in weights_of(model).items()}
    numbers = {name: group["numbers"] for group in record["groups"] for name in group["parameters"]}
    parameters = {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}
    if differing := sorted(numbers.keys() ^ parameters.keys()):
        raise UserError(
            f"{folder}: saved while other parameters were trained ({listed(differing)}); train the same ones"
        )

    # An optimizer that keeps its state elsewhere than beside the parameters has copies of them there.
    homes = getattr(optimizer, "host_copies", {})
    arrays = _empty_arrays({name: homes.get(parameter, parameter) for name, parameter in parameters.items()}, folder)
    read_tensors(arrays, folder)
    optimizer.state.clear()
    for full_name, array in arrays.items():
        name, _, key = full_name.rpartition(".")
        optimizer.state[parameters[name]][key] = array
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            device = homes.get(parameter, parameter).device if on_device else torch.device("cpu")
            for key, value in record["scalars"].get(names[parameter], {}).items():
                optimizer.state[parameter][key] = _from_json(value, device)
            group.update({key: _from_json(value) for key, value in numbers[names[parameter]].items()})


def _empty_arrays(parameters: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Room for every array in `folder`, laid out over the mesh as the optimizer would have made it."""
    arrays = {}
    for full_name, stored in list_tensors(folder).items():
        parameter = parameters[full_name.rpartition(".")[0]].detach()
        arrays[full_name] = parameter.new_empty(stored.shape, dtype=stored.dtype)
    return arrays


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _is_number(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _to_json(value: object) -> object:
    if isinstance(value, Tensor):
        return {"number": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _from_json(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["number"], dtype=getattr(torch, value["dtype"]), device=device)
    return tuple(value) if isinstance(value, list) else value
