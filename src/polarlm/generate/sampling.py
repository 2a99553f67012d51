"""From the logits of the next token to the token."""

import torch
from torch import Tensor

from polarlm.generate.settings import Settings


class Sampler:
    """Chooses one prompt's tokens, with a generator of its own.

    It works on the CPU in float64: the same seed gives the same text on every device, and no temperature overflows.
    """

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.generator = torch.Generator("cpu")
        if settings.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(settings.seed)

    def __call__(self, logits: Tensor) -> int:
        """logits [V or more] -> an id below `vocab_size`; rows that only pad the vocabulary are never chosen."""
        logits = logits[: self.vocab_size].to("cpu", torch.float64)
        temperature, top_k, top_p = self.settings.temperature, self.settings.top_k, self.settings.top_p
        if temperature == 0:
            return int(logits.argmax())
        # The largest becomes 0 first, so that a tiny temperature drives the others to -inf and not to overflow.
        weights = ((logits - logits.max()) / temperature).exp()
        if top_k == 0 and top_p == 1:
            return int(torch.multinomial(weights, 1, generator=self.generator))
        weights, ids = weights.topk(min(top_k or self.vocab_size, self.vocab_size))  # the most likely first
        share_before = (weights.cumsum(0) - weights) / weights.sum()
        weights[1:][share_before[1:] >= top_p] = 0  # the first always stays
        return int(ids[torch.multinomial(weights, 1, generator=self.generator)])
