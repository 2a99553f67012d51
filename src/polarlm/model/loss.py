"""The training loss, as a module that a layout may replace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100  # the target of a position that is not trained

_CHUNK_LOGITS = 1 << 21  # of one chunk: few enough to stay in a cache
_FEWEST_ROWS = 256  # of one chunk: enough for a matrix product to run at speed


class CrossEntropy(nn.Module):
    """Negative log-likelihood of the targets, summed; the caller divides by the trained tokens of the global batch.

    In training, and only there, `label_smoothing` ε spreads that share of each target over the vocabulary (arXiv
    1512.00567), and `z_loss` adds z · (log Σ exp logits)² a token, which keeps logits near zero (arXiv 2204.02311).

    Attributes:
        gradient_scale: what the gradients will be multiplied by in backward, as far as a power of two can say it: the
            products of half precision are taken at that size, for which a loss scale was chosen.
        rows: None; or a list to which each pass in training appends float64 [B, 2], the summed loss and the trained
            tokens of each row.
    """

    def __init__(self, z_loss: float = 0.0, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.z_loss, self.label_smoothing = z_loss, label_smoothing
        self.gradient_scale = 1.0
        self.rows: list[Tensor] | None = None

    def forward(self, hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, S, H], head_weight [V, H], targets int64 [B, S] (`IGNORED` is not trained) -> fp32 scalar, nats.

        Without any trained token the sum is 0, and so are its gradients.
        """
        return self.fused(hidden, head_weight, targets, Vocabulary(len(head_weight)))

    def fused(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, vocabulary: "Vocabulary") -> Tensor:
        """The same where `head_weight` has the rows that `vocabulary` says."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        extras = (self.z_loss, self.label_smoothing) if self.training else (0.0, 0.0)
        with torch.autocast(device, enabled=False), self.keeping_rows(targets) as token_losses:
            return _FusedCrossEntropy.apply(
                hidden.flatten(0, 1),
                head_weight,
                targets.flatten(),
                dtype,
                *extras,
                token_losses,
                self.gradient_scale,
                vocabulary,
            )

    @contextmanager
    def keeping_rows(self, targets: Tensor) -> Iterator[Tensor | None]:
        """Hands out fp32 [B·S], to be filled with the token losses, and keeps the sums of their rows; or None."""
        if self.rows is None or not self.training:
            yield None
            return
        token_losses = torch.empty(targets.shape, device=targets.device)
        yield token_losses.flatten()
        trained = (targets != IGNORED).sum(1, dtype=torch.float64)
        self.rows.append(torch.stack([token_losses.sum(1, dtype=torch.float64), trained], dim=1))


class Vocabulary:
    """The rows of the head that this process holds: all. A layout that shares them out says which, and how the ranks
    put together what each finds in its own.

    Attributes:
        size: V, of all rows.
        first: the id of the first row that is here.
        most: how many rows any process holds.
    """

    def __init__(self, size: int) -> None:
        self.size, self.first, self.most = size, 0, size

    def reduce_max(self, values: Tensor) -> None:
        """Put the largest over all who share the vocabulary in the values' place."""

    def reduce_sum(self, values: Tensor) -> None:
        """Put the sum over all who share the vocabulary in the values' place."""


class _FusedCrossEntropy(torch.autograd.Function):
    """Projection and cross-entropy in one pass over chunks of tokens, gradients included, since the softmax that gives
    the loss gives them too. The logits of all tokens, by far the largest activation of a small model, never exist."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        z_loss: float,
        smoothing: float,
        token_losses: Tensor | None,
        gradient_scale: float,
        vocabulary: Vocabulary,
    ) -> Tensor:
        """hidden [N, H], weight [V, H], targets [N]; the products are taken in `dtype`, the softmax in fp32.

        `token_losses` [N] is filled where it is given; see `CrossEntropy` for `gradient_scale`.
        """
        wants_gradients = any(ctx.needs_input_grad)
        matrix = weight.to(dtype)
        total = torch.zeros((), device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wants_gradients else None
        # The chunks' sum is in fp32 at least, for their number would add to the error.
        sum_type = torch.promote_types(weight.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=sum_type) if wants_gradients else None
        rows = max(_FEWEST_ROWS, _CHUNK_LOGITS // vocabulary.most)
        # One buffer for all chunks: a fresh one for each would cost the system as much as filling it.
        buffer = hidden.new_empty(min(rows, len(hidden)), len(weight), dtype=torch.float32)
        for start in range(0, len(hidden), rows):
            some = hidden[start : start + rows].to(dtype)
            loss, logit_grad = _loss_and_gradient(
                _product(some, matrix.mT, out=buffer[: len(some)]),
                targets[start : start + rows],
                z_loss,
                smoothing,
                wants_gradients * gradient_scale,
                vocabulary,
            )
            total += loss.sum()
            if token_losses is not None:
                token_losses[start : start + rows] = loss
            if wants_gradients:
                logit_grad = logit_grad.to(dtype)
                hidden_grad[start : start + rows] = logit_grad @ matrix
                if dtype == sum_type:
                    weight_grad.addmm_(logit_grad.mT, some)
                else:
                    weight_grad += logit_grad.mT @ some
        ctx.weight_type = weight.dtype
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.gradient_scale = gradient_scale
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: some pipeline schedules ask twice, for the input's gradient first and the weight's later.
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = scale / ctx.gradient_scale
        return hidden_grad * scale, (weight_grad * scale).to(ctx.weight_type), *[None] * 7


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b, in `out` of fp32."""
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)


def _loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    z_loss: float,
    smoothing: float,
    gradient_scale: float,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """The losses [N] of logits [N, V], or those of the columns that are here, and `gradient_scale` times the gradient
    of their sum in the logits' place; where that is 0, none is computed."""
    is_trained = targets != IGNORED
    columns = logits.shape[1]
    local = targets - vocabulary.first
    is_here = is_trained & (local >= 0) & (local < columns)
    index = local.where(is_here, 0)[:, None]
    highest = logits.amax(1) if columns else logits.new_full((len(logits),), -torch.inf)
    vocabulary.reduce_max(highest)
    logits -= highest[:, None]
    chosen = logits.gather(1, index)[:, 0].where(is_here, 0.0) if columns else torch.zeros_like(highest)
    mean = logits.sum(1) / vocabulary.size if smoothing else torch.zeros_like(chosen)
    sums = torch.stack([logits.exp_().sum(1), chosen, mean])
    vocabulary.reduce_sum(sums)
    total, chosen, mean = sums
    log_sum = total.log()
    whole_log_sum = log_sum + highest
    loss = log_sum - (1 - smoothing) * chosen - smoothing * mean + z_loss * whole_log_sum**2
    if gradient_scale and columns:
        factor = is_trained * gradient_scale
        logits *= (factor * (1 + 2 * z_loss * whole_log_sum) / total)[:, None]
        if smoothing:
            logits -= (smoothing / vocabulary.size) * factor[:, None]
        logits.scatter_add_(1, index, (smoothing - 1) * (factor * is_here)[:, None])
    return loss.where(is_trained, 0.0), logits
