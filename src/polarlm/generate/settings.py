"""What a user may ask of a completion."""

import math
from dataclasses import dataclass

from polarlm.config import UserError


@dataclass(frozen=True)
class Settings:
    """How one prompt is completed.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token, whatever the other settings.
        top_k: draw among the k most likely tokens; 0 is among all.
        top_p: then among the fewest of them whose probabilities reach p (nucleus sampling, arXiv 1904.09751).
        max_tokens: most tokens to write.
        stop: texts that end the completion, and are not part of it.
        seed: of this prompt's draws, so that its text does not depend on its companions; None is a new one each time.

    Raises:
        UserError: a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature: {self.temperature} is not a number from 0 (most likely token) upwards")
        if self.top_k < 0:
            raise UserError(f"top_k: {self.top_k} is negative; give how many tokens to draw among, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p} is not a probability above 0; 1 draws among all tokens")
        if self.max_tokens < 0:
            raise UserError(f"max_tokens: {self.max_tokens} is negative; give how many tokens to write at most")
        if "" in self.stop:
            raise UserError("stop: an empty text would end every completion at once; leave it out")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed: {self.seed} is not a whole number from 0 to 2^63 - 1")
