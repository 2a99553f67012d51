"""Statistics of each layer: which one's gradients or activations run away, or die."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from polarlm.parallel import Engine


class LayerStatistics:
    """Gradient norms of all parts of a model, and the root mean square of what each block gives, every few steps."""

    def __init__(self, engine: Engine, optimizer: Optimizer, every: int, clip: float) -> None:
        """
        Args:
            every: steps between two looks; 0 is never.
            clip: largest gradient norm, as the step clips it.
        """
        self._engine, self._optimizer, self._every, self._clip = engine, optimizer, every, clip

    @contextmanager
    def of_step(self, step: int) -> Iterator[None]:
        """Look at what happens inside, if it is this step's turn; every rank calls."""
        self._gradients: dict[str, float] = {}
        self._activations: dict[str, list[Tensor]] = defaultdict(list)
        hooks = []
        if self._every and step % self._every == 0:
            hooks.append(self._optimizer.register_step_pre_hook(self._see_gradients))
            # Compiled with its block, each block's would be another code, until the compiler gives up.
            see_activations = torch.compiler.disable(self._see_activations)
            for number, block in self._engine.model.blocks.items():
                hooks.append(block.register_forward_hook(partial(see_activations, f"blocks.{number}")))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def values(self, grad_norm: float) -> dict[str, float]:
        """What was seen, over all ranks: `grad_norm/PART` before clipping, and `activation_rms/BLOCK`.

        Args:
            grad_norm: of the whole model, before clipping.
        """
        if not self._gradients:
            return {}
        squares = {name: torch.stack(seen).sum(0).tolist() for name, seen in self._activations.items()}
        clipped_by = max(1.0, grad_norm / self._clip) if self._clip else 1.0
        gradients, totals = {}, defaultdict(lambda: [0.0, 0.0])
        for others_gradients, others_squares in self._engine.world.gather((self._gradients, squares)):
            gradients |= others_gradients
            for name, (total, count) in others_squares.items():
                totals[name][0] += total
                totals[name][1] += count
        return {f"grad_norm/{name}": norm * clipped_by for name, norm in gradients.items()} | {
            f"activation_rms/{name}": (total / count) ** 0.5 for name, (total, count) in totals.items()
        }

    def _see_gradients(self, *_: object) -> None:
        parts = defaultdict(list)
        model = self._engine.model
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and name not in model.copies:
                parts[_part_of(name)].append(parameter.grad)
        for part, gradients in parts.items():
            norm = nn.utils.get_total_norm(gradients)
            self._gradients[part] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def _see_activations(self, name: str, block: nn.Module, inputs: tuple, output: Tensor) -> None:
        # Each rank counts the part that it holds; parts that several hold count as often in both sums.
        local = (output.to_local() if isinstance(output, DTensor) else output).detach().float()
        self._activations[name].append(torch.stack([local.square().sum(), local.new_tensor(local.numel())]))


def _part_of(name: str) -> str:
    """`blocks.3` for all parameters of block 3; `embedding`, `norm` or `head` for the others."""
    return ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
