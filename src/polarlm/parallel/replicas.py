"""Data parallelism where every rank holds all that it trains: gradients are summed over the ranks where they lie.

The parameters are the model's own, as on one process. FSDP on a mesh of (n, 1) would hold each of them twice in a step,
and each gradient up to three times while it travels.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polarlm.model import Transformer
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.shard import local_part


class Replicas:
    """Sums the gradients of parameters that every replica holds, once a step and in place.

    A block's travel together, as soon as the last of them is there, while the backward pass goes on with the block
    before; those of any other parameter alone, for a vocabulary's are larger than a block's.
    """

    def __init__(self, model: Transformer, mesh: Mesh) -> None:
        self._group = mesh.group("replicate") if mesh.size("replicate") > 1 else None
        blocks = [list(block.parameters()) for block in model.blocks.values()]
        in_blocks = {parameter for block in blocks for parameter in block}
        self._units = [*blocks, *([other] for other in model.parameters() if other not in in_blocks)]
        self._is_last = False
        self._missing = self._count()
        self._sending: list[dist._CoalescingManager] = []
        for number, unit in enumerate(self._units):
            for parameter in unit:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    def before_microbatch(self, is_last: bool) -> None:
        """Say whether the next backward pass completes the step's gradients, so that they go as they come."""
        self._is_last, self._missing = is_last, self._count()

    def finish(self) -> None:
        """Send what no backward pass has sent, and wait until all gradients are the sums over all replicas."""
        for number in self._missing:
            self._send(self._units[number])
        self.before_microbatch(is_last=False)
        while self._sending:
            self._sending.pop().wait()

    def _count(self) -> dict[int, int]:
        """By unit that has not been sent in this step, how many of its gradients are to come."""
        return {number: len(unit) for number, unit in enumerate(self._units)}

    def _arrived(self, number: int, _: Tensor) -> None:
        if not self._is_last:
            return
        self._missing[number] -= 1
        if self._missing[number] == 0:
            del self._missing[number]
            self._send(self._units[number])

    @torch.no_grad()
    def _send(self, unit: Iterable[nn.Parameter]) -> None:
        gradients = [_settled(parameter) for parameter in unit if parameter.grad is not None]
        if self._group is None or not gradients:
            return
        with dist._coalescing_manager(self._group, async_ops=True) as sending:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self._group)
        self._sending.append(sending)


def _settled(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient. Where each rank of a tensor group has a summand, as of a norm's whose tokens they
    share, it becomes their sum first."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    if not local_part(gradient).is_contiguous():  # from a backward pass in two parts
        gradient = parameter.grad = gradient.contiguous()
    return local_part(gradient)
