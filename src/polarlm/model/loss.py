"""The training loss, as a module that a layout may replace."""

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # the target of a position that is not trained


class CrossEntropy(nn.Module):
    """Negative log-likelihood of the targets, summed.

    The caller divides by the trained tokens of the whole global batch, which no single call knows.
    """

    def forward(self, hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
        """hidden [B, S, H], head_weight [V, H], targets int64 [B, S] (`IGNORED` is not trained) -> fp32 scalar, nats.

        Without any trained token the sum is 0, and so are its gradients.
        """
        logits = F.linear(hidden, head_weight).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
