"""The training loss, as a module that a layout may replace."""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100  # the target of a position that is not trained

_CHUNK_LOGITS = 1 << 20  # of one chunk: few enough to stay in a cache
_FEWEST_ROWS = 128  # of one chunk: enough for a matrix product to run at speed


class CrossEntropy(nn.Module):
    """Negative log-likelihood of the targets, summed.

    The caller divides by the trained tokens of the whole global batch, which no single call knows.
    """

    def forward(self, hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, S, H], head_weight [V, H], targets int64 [B, S] (`IGNORED` is not trained) -> fp32 scalar, nats.

        Without any trained token the sum is 0, and so are its gradients.
        """
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            return _FusedCrossEntropy.apply(hidden.flatten(0, 1), head_weight, targets.flatten(), dtype)


class _FusedCrossEntropy(torch.autograd.Function):
    """Projection and cross-entropy in one pass over chunks of tokens, gradients included, since the softmax that gives
    the loss gives them too. The logits of all tokens, by far the largest activation of a small model, never exist."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """hidden [N, H], weight [V, H], targets [N]; the products are taken in `dtype`, the softmax in fp32."""
        wants_gradients = any(ctx.needs_input_grad)
        matrix = weight.to(dtype)
        total = torch.zeros((), device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wants_gradients else None
        weight_grad = torch.zeros_like(matrix) if wants_gradients else None
        rows = max(_FEWEST_ROWS, _CHUNK_LOGITS // len(weight))
        for start in range(0, len(hidden), rows):
            some, wanted = hidden[start : start + rows].to(dtype), targets[start : start + rows]
            is_trained = wanted != IGNORED
            index = wanted.where(is_trained, 0)[:, None]
            logits = (some @ matrix.mT).float()
            logits -= logits.amax(1, keepdim=True)
            chosen = logits.gather(1, index)[:, 0]
            sums = logits.exp_().sum(1)
            total += (sums.log() - chosen).where(is_trained, 0.0).sum()
            if wants_gradients:
                logits *= (is_trained / sums)[:, None]
                logits.scatter_add_(1, index, -is_trained.float()[:, None])
                logit_grad = logits.to(dtype)
                hidden_grad[start : start + rows] = logit_grad @ matrix
                weight_grad.addmm_(logit_grad.mT, some)
        ctx.gradients = hidden_grad, weight_grad, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, weight_grad, weight_dtype = ctx.gradients
        ctx.gradients = None
        return hidden_grad.mul_(scale), weight_grad.to(weight_dtype).mul_(scale), None, None
