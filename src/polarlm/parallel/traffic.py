"""What a piece of work says to other ranks: each collective by axis of the mesh and kind, and its bytes.

Every collective of torch's, be it called by FSDP, by DTensor or by `torch.distributed` itself, passes torch's
dispatcher as an operation of `c10d` or `_c10d_functional`, and is counted there.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from polarlm.parallel.mesh import Mesh

# operation: (kind, which of its arguments is sent)
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
}
# They move nothing: the other end of a send, waiting, and bookkeeping.
_SILENT = {"recv_", "recv_any_source_", "barrier", "wait_tensor", "_wrap_tensor_autograd"}

# Of the bytes a rank hands over, how many it sends at least in a group of n (Chan et al. 2007, doi 10.1002/cpe.1206).
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1,
}


class TrafficCounter(TorchDispatchMode):
    """While it is entered, counts what this rank sends.

    A group of every rank counts as the axis `world`, whichever axis is that long, one of no axis as `other`; a group of
    one sends nothing.

    Attributes:
        calls, bytes: by (axis, kind); kinds are all_gather, reduce_scatter, all_reduce, all_to_all, send, broadcast,
            and the operation's own name for any other.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.calls: dict[tuple[str, str], int] = {}
        self.bytes: dict[tuple[str, str], float] = {}
        self._axes = _axes_of(mesh)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        """Count, and do."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as what it does to the local tensors
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        kind, position = _OPERATIONS.get(name, (name, 0))
        group = _group_of(args)
        ranks = group.size()
        if ranks == 1:
            return
        # DTensor may speak through the equal group of a mesh before this one, whose operations it keeps: same ranks.
        names = group.group_name, tuple(dist.get_process_group_ranks(group))
        key = next((self._axes[name] for name in names if name in self._axes), "other"), kind
        share = _SHARES[kind](ranks) if kind in _SHARES else 1
        self.calls[key] = self.calls.get(key, 0) + 1
        self.bytes[key] = self.bytes.get(key, 0.0) + _bytes(args[position]) * share


def _axes_of(mesh: Mesh) -> dict[str | tuple[int, ...], str]:
    """The axis of each process group of a mesh, by the group's name and by its ranks."""
    if mesh.tokens is None or mesh.weights is None:
        return {}
    axes: dict[str | tuple[int, ...], str] = {}
    for view in (mesh.tokens, mesh.weights):
        for axis in view.mesh_dim_names:
            group = view[axis].get_group()
            axes |= {group.group_name: axis, tuple(dist.get_process_group_ranks(group)): axis}
    world = dist.group.WORLD
    return axes | {world.group_name: "world", tuple(dist.get_process_group_ranks(world)): "world"}


def _group_of(args: tuple) -> dist.ProcessGroup:
    """The process group among an operation's arguments: itself, or, last of the functional ones, its name."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group(next(a for a in reversed(args) if isinstance(a, str)))


def _bytes(sent: Tensor | Sequence) -> int:
    if isinstance(sent, Tensor):
        return math.prod(sent.shape) * sent.element_size()
    return sum(_bytes(part) for part in sent)
