"""Muon: momentum made orthogonal before each step (K. Jordan, 2024, kellerjordan.github.io/posts/muon).

torch's own runs its Newton-Schulz iteration in bf16, which a CPU without bf16 units does many times slower than fp32,
and on each rank's shard alone, which is another optimizer. Here the iteration runs in the type that the device is fast
in, on whole matrices, and ranks that hold the same ones share out the work.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

_QUINTIC = (3.4445, -4.7750, 2.0315)  # pulls every singular value to about 1 in five steps, from 0.01 on
_ITERATIONS = 5
_MOMENTUM = 0.95
_RMS = 0.2  # of an update, as AdamW's; so both take one learning rate and decay (arXiv 2502.16982, equation 4)


class Muon(Optimizer):
    """Muon for hidden matrices, AdamW for everything else, as one optimizer with one state by parameter.

    M ← μM + (1-μ)G;  W ← (1 - ηλ)W - η · 0.2·√max(m, n) · orthogonal((1-μ)G + μM), for W of m x n.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], groups: Iterable[dict], *, lr: float, weight_decay: float, **adamw: Any
    ) -> None:
        """
        Args:
            matrices: parameters [m, n] that Muon steps; its state of each is one `momentum` of that shape.
            groups: AdamW's parameter groups.
            lr: of both.
            weight_decay: of the matrices; a group of AdamW's has its own.
            adamw: AdamW's other arguments.
        """
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._adamw = AdamW(groups, lr=lr, **adamw)
        self._adamw.state = self.state
        self.param_groups += self._adamw.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Let AdamW step the rest, then step the matrices, those of one shape together."""
        self._adamw.step()
        matrices = self.param_groups[0]
        trained = [parameter for parameter in matrices["params"] if parameter.grad is not None]
        for shape, alike in groupby(sorted(trained, key=_shape), key=_shape):
            parameters = list(alike)
            directions = torch.stack([_whole(self._direction(parameter)) for parameter in parameters])
            updates = _share_out(directions, _sharers(parameters[0]))
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - matrices["lr"] * matrices["weight_decay"])
                scale = _RMS * max(shape) ** 0.5
                parameter.add_(_like(update.to(parameter.dtype), parameter), alpha=-matrices["lr"] * scale)

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """Nesterov's momentum."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
        return parameter.grad.lerp(momentum, _MOMENTUM)


def orthogonalise(matrices: Tensor) -> Tensor:
    """matrices [B, m, n] -> the nearest ones with orthonormal rows or columns, roughly, by a quintic Newton-Schulz
    iteration: UΣVᵀ to about UVᵀ."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT).mT  # products are smaller the short way
    linear, cubic, quintic = _QUINTIC
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x


def _share_out(matrices: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`orthogonalise` of matrices that every rank of the group has, each rank doing its share."""
    if group is None:
        return orthogonalise(matrices)
    share = -(-len(matrices) // group.size())
    own = orthogonalise(matrices[group.rank() * share : (group.rank() + 1) * share])
    padded = torch.cat([own, own.new_zeros(share - len(own), *own.shape[1:])])
    everyones = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(everyones, padded, group)
    return torch.cat(everyones)[: len(matrices)]


def _sharers(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks along the longest axis of the parameter's mesh; None for one alone."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return None
    sizes = parameter.device_mesh.shape
    return parameter.device_mesh.get_group(sizes.index(max(sizes)))


def _shape(parameter: Tensor) -> torch.Size:
    return parameter.shape


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, laid out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
