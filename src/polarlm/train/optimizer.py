"""The optimizer of a run: which parameters decay, and how steps are taken."""

from torch import nn
from torch.optim import AdamW, Optimizer

from polarlm.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW (arXiv 1711.05101) over two groups: matrices, which decay, and vectors (biases, norms), which do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
