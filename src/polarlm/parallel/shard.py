"""Data parallelism and ZeRO (arXiv 1910.02054) by one engine, FSDP2's `fully_shard`.

Every reduction is a sum: the loss of a microbatch is already divided by the trained tokens of the global batch, so
that gradients of ranks and microbatches with different numbers of trained tokens add up to the right mean.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh | None) -> None:
    """Share the model out over the mesh's data-parallel axes, in place; on one process this is the identity.

    Args:
        blocks: the parts that communicate on their own, so that their traffic overlaps with the others' work.
        mesh: axes (dp_replicate, dp_shard); stage 0 is all replicas and shards of one.
    """
    if mesh is None:
        return
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def reduce_gradients_after(model: nn.Module, is_last_microbatch: bool) -> None:
    """Say before a microbatch whether its backward pass reduces the accumulated gradients over the ranks."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last_microbatch)


def clip_gradients(model: nn.Module, largest_norm: float) -> float:
    """Scale all gradients so that their norm over the whole model is at most `largest_norm`; 0 leaves them alone.

    Returns:
        The norm before clipping, the same on every rank; each parameter counts once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if largest_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, largest_norm, norm)
    return norm.item()


@torch.no_grad()
def distribute(full: torch.Tensor, parameter: torch.Tensor) -> None:
    """Fill this rank's part of `parameter` from the full tensor, which every rank holds."""
    if isinstance(parameter, DTensor):
        full = torch.distributed.tensor.distribute_tensor(
            full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)
