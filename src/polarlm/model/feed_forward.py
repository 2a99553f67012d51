"""The feed-forward half of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.config import ModelConfig
from polarlm.model.layers import Linear


class FeedForward(nn.Module):
    """down(GELU(up x)) with GPT-2's tanh form (arXiv 1606.08415), or SwiGLU: down(SiLU(gate x) * up x) (2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        self.gate = Linear(config.hidden, config.ffn, bias=config.bias) if gated else None
        self.up = Linear(config.hidden, config.ffn, bias=config.bias)
        self.down = Linear(config.ffn, config.hidden, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, H] -> [B, S, H]."""
        if self.gate is None:
            return self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))
