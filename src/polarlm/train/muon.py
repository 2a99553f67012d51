"""Muon: momentum made orthogonal before each step (K. Jordan, 2024, kellerjordan.github.io/posts/muon).

torch's own runs its Newton-Schulz iteration in bf16, which a CPU without bf16 units does many times slower than fp32,
and on each rank's shard alone, which is another optimizer. Here the iteration runs in the type that the device is fast
in, and on whole matrices.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

_QUINTIC = (3.4445, -4.7750, 2.0315)  # pulls every singular value to about 1 in five steps, from 0.01 on
_ITERATIONS = 5
_MOMENTUM = 0.95
_RMS = 0.2  # of an update, as AdamW's; so both take one learning rate and decay (arXiv 2502.16982, equation 4)


class Muon(AdamW):
    """Muon for hidden matrices, AdamW for everything else, in one optimizer with one state by parameter."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], groups: Iterable[dict], *, weight_decay: float, **adamw
    ) -> None:
        """
        Args:
            matrices: parameters [m, n] that Muon steps; its state of each is one `momentum` of that shape.
            groups: AdamW's parameter groups.
            adamw: AdamW's own arguments; `lr` is Muon's too.
        """
        muon = {"params": list(matrices), "weight_decay": weight_decay, "is_muon": True}
        super().__init__([muon, *({**group, "is_muon": False} for group in groups)], **adamw)

    @torch.no_grad()
    def step(self, closure=None):
        """Step the matrices, then let AdamW step the rest."""
        every_group = self.param_groups
        for group in every_group:
            if group["is_muon"]:
                for parameter in group["params"]:
                    self._step_matrix(parameter, group["lr"], group["weight_decay"])
        self.param_groups = [group for group in every_group if not group["is_muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = every_group

    def _step_matrix(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
        direction = _whole(parameter.grad.lerp(momentum, _MOMENTUM))  # Nesterov's
        update = orthogonalise(direction) * (_RMS * math.sqrt(max(direction.shape)))
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(_like(update.to(parameter.dtype), parameter), alpha=-lr)


def orthogonalise(matrix: Tensor) -> Tensor:
    """The nearest matrix [m, n] with orthonormal rows or columns, roughly, by a quintic Newton-Schulz iteration."""
    a, b, c = _QUINTIC
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    x = x / (x.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + torch.addmm(b * gram, gram, gram, alpha=c) @ x
    return x.mT if is_tall else x


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, laid out as a parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
