"""An optimizer's state by parameter name: arrays as tensors, single numbers as JSON.

Any optimizer will do that keeps its state by parameter in `optimizer.state`, as PyTorch's own do.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from polarlm.checkpoint.tensors import Stored, list_tensors, read_tensors
from polarlm.checkpoint.weights import gather_named, listed, names_of
from polarlm.config import UserError


def take_optimizer(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state as it is saved: this rank's arrays, named `<parameter>.<key>`, and its single numbers by parameter.

    A group's switches, such as `fused`, belong to the machine and stay.

    Returns:
        The arrays, and for `record_of` what JSON can say: `scalars`, the state's by parameter and key, and `numbers`,
        those of the parameter's group (learning rate, betas, ...).
    """
    names = names_of(model)
    arrays: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        arrays |= {f"{name}.{key}": value for key, value in state.items() if _is_array(value)}
        scalars[name] = {key: _to_json(value) for key, value in state.items() if not _is_array(value)}
    numbers = {
        names[parameter]: {key: value for key, value in group.items() if _is_number(value)}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return arrays, {"scalars": scalars, "numbers": numbers}


def record_of(everyones: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of all ranks together: `scalars`, and `groups`, the parameters and the numbers of each."""
    scalars: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for each in everyones:
        scalars |= each["scalars"]
        numbers |= each["numbers"]
    return {"scalars": scalars, "groups": _groups_alike(numbers)}


def make_state(optimizer: Optimizer) -> None:
    """Let an optimizer that has taken no step make its state, by a step of nothing; every rank calls.

    So `fill_optimizer` can tell a state that is not this optimizer's. Weights must be filled afterwards.
    """
    if optimizer.state:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def fill_optimizer(optimizer: Optimizer, model: nn.Module, folder: Path, record: Mapping[str, Any]) -> None:
    """Give the optimizer the state that `take_optimizer` took, under whatever layout that was; every rank calls.

    Args:
        folder: the shards of its arrays.
        record: its record.

    Raises:
        UserError: the optimizer has parameters that the saved one had not, or lacks some; or the state is another
            optimizer's.
    """
    names = names_of(model)
    numbers = {name: group["numbers"] for group in record["groups"] for name in group["parameters"]}
    parameters: dict[str, list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters[names[parameter]].append(parameter)
    if differing := sorted(numbers.keys() ^ gather_named(dict.fromkeys(parameters)).keys()):
        raise UserError(
            f"{folder}: saved while other parameters were trained ({listed(differing)}); train the same ones"
        )

    # An optimizer that keeps its state elsewhere than beside the parameters has copies of them there.
    homes = getattr(optimizer, "host_copies", {})
    stored = list_tensors(folder)
    if strangers := sorted(name for name in stored if name.rpartition(".")[0] not in numbers):
        raise UserError(f"{folder}: holds {listed(strangers)}, of no parameter it names; choose another checkpoint")
    _check_state(optimizer, names, stored, record["scalars"], folder)
    arrays = _empty_arrays({name: homes.get(alike[0], alike[0]) for name, alike in parameters.items()}, stored)
    read_tensors(arrays, folder)
    optimizer.state.clear()
    for full_name, array in arrays.items():
        name, _, key = full_name.rpartition(".")
        for parameter in parameters[name]:
            optimizer.state[parameter][key] = array if parameter is parameters[name][0] else array.clone()
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            device = homes.get(parameter, parameter).device if on_device else torch.device("cpu")
            for key, value in record["scalars"].get(names[parameter], {}).items():
                optimizer.state[parameter][key] = _from_json(value, device)
            own = numbers[names[parameter]]
            group.update({key: _from_json(own[key]) for key in own.keys() & group.keys() - {"params"}})


def _groups_alike(numbers: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameters that have the same numbers, together."""
    groups: list[dict[str, Any]] = []
    for name, own in numbers.items():
        group = next((group for group in groups if group["numbers"] == own), None)
        if group is None:
            groups.append({"parameters": [name], "numbers": own})
        else:
            group["parameters"].append(name)
    return groups


def _check_state(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    stored: Mapping[str, Stored],
    scalars: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> None:
    """Compare each parameter's saved state with the one that the optimizer has of it, where both are there."""
    saved: dict[str, dict[str, Any]] = defaultdict(dict)
    for full_name, array in stored.items():
        name, _, key = full_name.rpartition(".")
        saved[name][key] = tuple(array.shape) if array.dtype.is_floating_point else array.dtype
    for name, numbers in scalars.items():
        saved[name] |= {key: value["dtype"] if isinstance(value, dict) else None for key, value in numbers.items()}
    for parameter, state in optimizer.state.items():
        own = {key: _kind(value) for key, value in state.items()}
        other = saved.get(names[parameter])
        if own and other and own != other:
            raise UserError(
                f"{folder}: holds {names[parameter]}'s {listed(sorted(other))}, of other shapes or another optimizer "
                f"than this run's, which keeps {listed(sorted(own))}; go on with the optimizer of before, or start a "
                "new run with train.init_from"
            )


def _kind(value: object) -> object:
    """An array's shape, the type of a tensor of no dims, None for a plain number."""
    if not isinstance(value, Tensor):
        return None
    return tuple(value.shape) if value.ndim else str(value.dtype).removeprefix("torch.")


def _empty_arrays(parameters: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Room for each stored array of these parameters, laid out over the mesh as the optimizer would have it."""
    arrays = {}
    for full_name, array in stored.items():
        parameter = parameters.get(full_name.rpartition(".")[0])
        if parameter is not None:
            arrays[full_name] = parameter.detach().new_empty(array.shape, dtype=array.dtype)
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
