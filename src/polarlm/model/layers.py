"""The layers everything is built of; their weights are left empty, for `initial.draw` to give."""

from torch import nn

from polarlm.config import ModelConfig


class Linear(nn.Linear):
    """`nn.Linear` that draws no initial values."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are: drawing them here would cost time and depend on the order of construction."""


class TokenTable(nn.Embedding):
    """`nn.Embedding` that draws no initial values."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are, as in `Linear`."""


def build_norm(config: ModelConfig, width: int) -> nn.Module:
    """Normalisation over the last `width` values: LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467)."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
