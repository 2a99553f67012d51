"""ZeRO (arXiv 1910.02054) by FSDP2's `fully_shard`; what shares out nothing, as stage 0 does, is in `replicas`.

| stage | mesh (replicate, shard) | between its uses a rank holds | travels |
|---|---|---|---|
| 0 | (n, 1) | everything | gradients, once a step; see `replicas` |
| 1 | (r, s) | its shard of the optimizer's state | gradients once a step, parameters once a step |
| 2 | (r, s) | and of the gradients | gradients once a microbatch, parameters once a step |
| 3 | (r, s) | and of the parameters | gradients once, parameters twice a microbatch |

Over replicas gradients travel once a step in every stage, after they were added up in each group's shards.

Every reduction is a sum: the loss of a microbatch is already divided by the trained tokens of the global batch, so
that gradients of ranks and microbatches with different numbers of trained tokens add up to the right mean.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from polarlm.config import SPLIT_BACKWARD, ParallelConfig
from polarlm.model import Transformer
from polarlm.parallel.mesh import Mesh


def shard(
    model: nn.Module,
    parts: Iterable[nn.Module],
    parallel: ParallelConfig,
    mesh: Mesh,
    gathered_in: torch.dtype = torch.float32,
) -> None:
    """Share the model out over the mesh's (replicate, shard) axes, in place.

    Args:
        parts: those that communicate on their own, so that their traffic overlaps with the others' work, and no buffer
            is larger than one of them; the model itself does with what is in none.
        gathered_in: type of the parameters between ranks and in forward and backward; those of the optimizer and every
            sum of gradients are fp32.
    """
    # Pinned memory needs an accelerator's driver.
    pinned = mesh.world.device.torch.type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if parallel.offload == "parameters" else OffloadPolicy()
    # Of the model's inputs and what blocks hand on, nothing is cast: `autocast` says what is computed in which type.
    precision = MixedPrecisionPolicy(gathered_in, torch.float32, cast_forward_inputs=False)
    # Where nothing is repeated a sum over the replicas would only hold each gradient twice.
    axes = ("replicate", "shard") if mesh.size("replicate") > 1 else ("shard",)
    for part in (*parts, model):
        fully_shard(
            part,
            mesh=mesh.weights[axes],
            reshard_after_forward=lets_go_between_passes(parallel),
            mp_policy=precision,
            offload_policy=offload,
        )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def is_shared_out(parallel: ParallelConfig) -> bool:
    """Whether ranks share out what each would otherwise hold alike, or keep it elsewhere between its uses."""
    return parallel.shards > 1 or parallel.offload == "parameters"


def lets_go_between_passes(parallel: ParallelConfig) -> bool:
    """Whether gathered parameters are let go after each forward pass, and gathered again for its backward pass.

    ZeRO-3 does, but for the schedules that split a backward pass in two: under these PyTorch loses gradients then,
    without an error, and parameters stay gathered through the microbatches of a step.
    """
    splits_backward = parallel.pipeline > 1 and parallel.pipeline_schedule in SPLIT_BACKWARD
    return parallel.zero_stage == 3 and not splits_backward


class Shards:
    """Says before each microbatch of a sharded model's what its backward pass does: reduce the gradients, and let go of
    gathered parameters.

    Stage 1 adds up a step's gradients first and reduces them once, and so do replicas in every stage; up to stage 2
    parameters stay gathered through the microbatches of a step.
    """

    def __init__(self, model: FSDPModule, zero_stage: int) -> None:
        self._model, self._zero_stage = model, zero_stage

    def before_microbatch(self, is_last: bool) -> None:
        """To be called before its forward pass."""
        self._model.set_requires_gradient_sync(is_last or self._zero_stage >= 2)
        self._model.set_requires_all_reduce(is_last)
        self._model.set_reshard_after_backward(is_last or self._zero_stage == 3)

    def finish(self) -> None:
        """Nothing is left to do: the last backward pass waits for its own reductions."""


def clip_gradients(model: Transformer, largest_norm: float, mesh: Mesh, loss_scale: float = 1.0) -> float:
    """Scale all gradients so that their norm over the whole model is at most `largest_norm`; 0 leaves them alone.

    Args:
        loss_scale: what the loss was multiplied by, which is undone first.

    Returns:
        The norm before clipping, the same on every rank; each parameter counts once. An infinity or NaN on any rank
        makes it one on all.
    """
    if loss_scale != 1:
        parts = (local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
        torch._foreach_mul_(list(parts), 1 / loss_scale)
    gradients = [p.grad for name, p in model.named_parameters() if p.grad is not None and name not in model.copies]
    square = torch.stack([_square(gradient) for gradient in gradients]).sum().to(mesh.world.device.torch)
    for axis in ("shard", "tensor", "pipeline"):  # those along which ranks hold different gradients
        if mesh.size(axis) > 1:
            dist.all_reduce(square, group=mesh.group(axis))
    norm = square.sqrt()
    if largest_norm > 0:
        nn.utils.clip_grads_with_norm_(model.parameters(), largest_norm, norm)
    return norm.item()


def _square(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares of this rank's part of a gradient, divided by how many of its tensor group hold the same.

    Row by row: torch adds up one long norm in fp32 value after value on a CPU, which of GPT-2's embedding is 0.3 % off.
    """
    repeats = 1
    if isinstance(gradient, DTensor):
        axes = zip(gradient.device_mesh.mesh_dim_names or (), gradient.placements, strict=True)
        repeats = gradient.device_mesh["tensor"].size() if ("tensor", Replicate()) in axes else 1
    return torch.linalg.vector_norm(local_part(gradient), dim=-1).square().sum() / repeats


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def distribute(full: torch.Tensor, parameter: torch.Tensor) -> None:
    """Fill this rank's part of `parameter` from the full tensor, which every rank holds."""
    if isinstance(parameter, DTensor):
        full, parameter = _own_part(full, parameter), parameter.to_local()
    parameter.copy_(full)


def _own_part(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """A view of what this rank holds; torch's `distribute_tensor` may copy every rank's part on the way."""
    mesh, part = parameter.device_mesh, full
    # Tensor parallelism, innermost, cuts a parameter first, and ZeRO what that leaves of it.
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if not placement.is_replicate():
            parts, rank = part.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            part = parts[rank] if rank < len(parts) else part.narrow(placement.dim, 0, 0)
    return part
