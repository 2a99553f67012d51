"""The optimizer of a run: which parameters decay, and how steps are taken."""

from torch import nn
from torch.optim import AdamW, Optimizer

from polarlm.config import OptimizerConfig
from polarlm.train.adafactor import Adafactor
from polarlm.train.host_adamw import HostAdamW
from polarlm.train.muon import Muon


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, in_host_memory: bool = False) -> Optimizer:
    """The optimizer by its name; matrices decay, vectors (biases, norms) do not.

    `adamw` (arXiv 1711.05101) and `adafactor` step all of them; `muon` takes the matrices of the blocks
    and leaves embedding, head and vectors to AdamW.

    Args:
        in_host_memory: keep the moments there; for `adamw` alone.
    """
    named = dict(model.named_parameters())
    matrices = {name: parameter for name, parameter in named.items() if parameter.ndim >= 2}
    vectors = [parameter for parameter in named.values() if parameter.ndim < 2]
    decay = config.weight_decay
    moments = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": config.fused}
    if not config.fused:
        moments["foreach"] = True
    if config.name == "muon":
        hidden = [parameter for name, parameter in matrices.items() if name.startswith("blocks.")]
        others = [parameter for name, parameter in matrices.items() if not name.startswith("blocks.")]
        return Muon(hidden, _groups(others, vectors, decay), weight_decay=decay, **moments)
    groups = _groups(list(matrices.values()), vectors, decay)
    if config.name == "adafactor":
        return Adafactor(groups, lr=config.lr)
    return HostAdamW(groups, **moments) if in_host_memory else AdamW(groups, **moments)


def _groups(matrices: list[nn.Parameter], vectors: list[nn.Parameter], decay: float) -> list[dict]:
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
