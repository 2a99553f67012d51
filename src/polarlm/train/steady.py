"""Steps that go wrong, found before they change anything."""

import math
from collections.abc import Callable
from dataclasses import dataclass

PASSED_OVER = "passed over"  # what is wrong with a step whose samples a rewind jumps over
MOST_IN_A_ROW = 10  # bad steps, after which no rule but stopping makes sense
_LEAST_STEPS = 20  # good ones, before what is typical is known
_DECAY = 0.98  # of the running means: they remember about the last 50 steps

# From a step's loss and gradient norm to what is wrong with it, or None.
FaultOf = Callable[[float, float], str | None]


@dataclass
class Typical:
    """Running means over the good steps, with which a spike is compared; saved with a run, so that a resume knows them.

    Loss and gradient norm are the same on every rank, and so is what they are compared with: all decide alike, and the
    step has both numbers already.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0

    def fault(self, loss: float, grad_norm: float, spike_factor: float | None) -> str | None:
        """What is wrong with a step: a number that is not finite, or one of `spike_factor` times its running mean."""
        for name, value, mean in (("loss", loss, self.loss), ("gradient norm", grad_norm, self.grad_norm)):
            if not math.isfinite(value):
                return f"{name} {value}"
            if spike_factor and self.steps >= _LEAST_STEPS and value > spike_factor * mean:
                return f"{name} {value:.4g} is {value / mean:.3g} times its running mean"
        return None

    def take_in(self, loss: float, grad_norm: float) -> None:
        """Count a good step."""
        weight = max(1 - _DECAY, 1 / (self.steps + 1))
        self.loss += weight * (loss - self.loss)
        self.grad_norm += weight * (grad_norm - self.grad_norm)
        self.steps += 1
