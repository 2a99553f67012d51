"""The layers everything is built of; their weights are left empty, for `initial.draw` to give."""

import torch
from torch import Tensor, nn

from polarlm.config import ModelConfig


class Linear(nn.Linear):
    """`nn.Linear` that draws no initial values."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are: drawing them here would cost time and depend on the order of construction."""


class TokenTable(nn.Embedding):
    """`nn.Embedding` that draws no initial values."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are, as in `Linear`."""


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + ε) · weight over the last dim (arXiv 1910.07467), for which backward needs x and the roots alone.

    Attributes:
        is_fused: else it is the formula, operation by operation, each of which keeps what it needs.
    """

    is_fused = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H], of the type of x, computed in at least fp32."""
        if not self.is_fused:
            wide = _widened(x)
            return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)
        if x.device.type == "cpu":  # where torch has no kernel of its own
            return _RMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widened(x)
        scale = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, normal = _widened(grad), _widened(x) * scale
        of_normal = grad * normal
        inner = (of_normal * weight).mean(-1, keepdim=True)
        weight_grad = of_normal.sum(tuple(range(x.ndim - 1)))
        return ((grad * weight - normal * inner) * scale).to(x.dtype), weight_grad.to(weight.dtype), None


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    """Normalisation over the last `width` values: LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467)."""
    if config.norm == "rmsnorm":
        return RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
