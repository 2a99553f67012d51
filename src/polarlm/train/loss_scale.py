"""Dynamic loss scaling (arXiv 1710.03740), which fp16 needs: its smallest number is 6e-8, and many gradients are less.

The loss is multiplied before its backward pass, and the gradients are divided after it. What is too large for fp16 then
becomes an infinity, which the gradient norm over all axes of the mesh shows every rank at once: the step is left out.
"""

import math
from dataclasses import dataclass

from polarlm.config import TrainConfig

OVERFLOW = "overflow"  # what is wrong with a step that is left out for its loss scale alone
_FACTOR = 2.0  # by which it grows and shrinks; a power of two, so that it rounds nothing


@dataclass
class LossScale:
    """The scale of the next step; saved with a run."""

    scale: float
    clean_steps: int = 0  # since it changed

    @classmethod
    def of(cls, train: TrainConfig) -> "LossScale | None":
        """What a run begins with: none where its precision needs none."""
        return cls(train.loss_scale.initial) if train.precision == "fp16" else None

    def is_too_large(self, loss: float, grad_norm: float) -> bool:
        """Whether it spoilt a step: the loss is finite, the gradients are not, and a smaller scale is left to try."""
        return self.scale > 1 and math.isfinite(loss) and not math.isfinite(grad_norm)

    def shrink(self) -> None:
        """Halve it, after an overflow."""
        self.scale, self.clean_steps = self.scale / _FACTOR, 0

    def grow(self, interval: int) -> None:
        """Count a step that was taken, and double it after `interval` of them."""
        self.clean_steps += 1
        if self.clean_steps >= interval:
            self.scale, self.clean_steps = self.scale * _FACTOR, 0
