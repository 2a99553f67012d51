"""AdamW in host memory (ZeRO-Offload, arXiv 2101.06840)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer


class HostAdamW(Optimizer):
    """AdamW whose steps the host takes, on copies of this rank's parameters; a device holds parameters and gradients.

    A step moves 8 bytes a parameter of this rank's to the host and 4 back.

    Attributes:
        host_copies: by parameter, the tensor in host memory, laid out over the ranks alike, that the moments are of.
    """

    def __init__(self, groups: Iterable[dict], **numbers: Any) -> None:
        """
        Args:
            groups: AdamW's parameter groups.
            numbers: AdamW's other arguments.
        """
        super().__init__(groups, numbers)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.host_copies = {parameter: torch.empty_like(parameter, device="cpu") for parameter in parameters}
        self._adamw = AdamW([self._on_host(group) for group in self.param_groups])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every parameter that has a gradient."""
        for group, host_group in zip(self.param_groups, self._adamw.param_groups, strict=True):
            host_group.update(self._on_host(group))
        for parameter, copy in self.host_copies.items():
            # Loading a checkpoint changes a parameter, or its state, without a word to this optimizer.
            copy.copy_(parameter)
            copy.grad = None if parameter.grad is None else parameter.grad.to("cpu")
            self._adamw.state[copy] = self.state[parameter]
        self._adamw.step()
        self._adamw.zero_grad()
        for parameter, copy in self.host_copies.items():
            parameter.copy_(copy)

    def _on_host(self, group: dict) -> dict:
        return group | {"params": [self.host_copies[parameter] for parameter in group["params"]]}
