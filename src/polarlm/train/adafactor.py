"""Adafactor (arXiv 1804.04235): a second moment in as many numbers as a matrix has rows and columns."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

_SMALLEST_SCALE = 1e-3  # of a parameter, so that one that starts at zero moves


class Adafactor(Optimizer):
    """The paper's algorithms 4 to 6 as torch's own takes them, for parameters of any layout, which torch's refuses.

    The step is relative to the parameter: at most min(lr, 1/√t) · max(10⁻³, RMS(W)) in the mean square, without first
    moment, β₂ = 1 - t^-0.8. So a learning rate near 10⁻² suits it. Decay is decoupled, as AdamW's.
    """

    def __init__(self, groups: Iterable[dict], *, lr: float) -> None:
        """
        Args:
            groups: parameter groups; each may have a `weight_decay`.
        """
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["weight_decay"])

    def _step(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        if not self.state[parameter]:
            self.state[parameter] = _empty_state(parameter)
        state = self.state[parameter]
        state["step"] += 1
        step, smallest = state["step"].item(), torch.finfo(parameter.dtype).eps
        scale = min(lr, step**-0.5) * max(_SMALLEST_SCALE, _root_mean_square(parameter))
        second_moment = _follow(parameter.grad, state, step**-0.8, smallest)
        update = parameter.grad * second_moment.clamp(min=smallest**2).rsqrt()
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update, alpha=-scale / max(1.0, _root_mean_square(update)))


def _empty_state(parameter: Tensor) -> dict[str, Tensor]:
    step = torch.tensor(0.0)
    if parameter.ndim < 2:
        return {"step": step, "variance": torch.zeros_like(parameter)}
    rows, columns = parameter.shape
    return {
        "step": step,
        "row_variance": parameter.new_zeros(rows, 1),
        "column_variance": parameter.new_zeros(1, columns),
    }


def _follow(gradient: Tensor, state: dict[str, Tensor], share: float, smallest: float) -> Tensor:
    """Let the averages take in `share` of this gradient's squares; return the second moment that they stand for."""
    squares = gradient.square()
    if gradient.ndim < 2:
        return state["variance"].lerp_(squares, share)
    rows = state["row_variance"].lerp_(_replicated(squares.mean(1, keepdim=True)), share)
    columns = state["column_variance"].lerp_(_replicated(squares.mean(0, keepdim=True)), share)
    return rows * columns / rows.mean(0, keepdim=True).clamp(min=smallest)


def _root_mean_square(tensor: Tensor) -> float:
    norm = tensor.norm()
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() / tensor.numel() ** 0.5


def _replicated(tensor: Tensor) -> Tensor:
    """Sums over rows and columns are whole on every rank; they are small."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
