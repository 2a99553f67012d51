"""A run's model on its mesh, as the training step sees it: no axis shows through."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polarlm.config import RunConfig
from polarlm.model import IGNORED, Transformer
from polarlm.parallel.build import build_model
from polarlm.parallel.context import take_share
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.shard import clip_gradients, communicate_after
from polarlm.parallel.world import World

_AUTOCAST = {"bf16": torch.bfloat16}
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_KERNELS = {"auto": [*_FUSED, SDPBackend.MATH], "flash": _FUSED, "math": [SDPBackend.MATH]}

# What a microbatch is here: (tokens, positions, document ids or None, targets), each [B, S].
Arrays = tuple[Tensor, Tensor, Tensor | None, Tensor]


class Engine:
    """This rank's part of a model, and how to run it with the others.

    Attributes:
        model: this rank's part; parameters may be shards, their names are those of one process.
        data_rank, data_ranks: which part of each global batch this rank's samples are.
        dropout_rank: ranks that must draw different dropout have different numbers.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.world = world
        self.mesh = Mesh(config.parallel, world)
        self.model: Transformer = build_model(config, self.mesh)
        self.data_rank, self.data_ranks = self.mesh.rank("data"), self.mesh.size("data")
        self.dropout_rank = world.rank
        self._zero_stage = config.parallel.zero_stage
        self._precision = config.train.precision
        self._attention = config.train.attention
        self._context_method = config.parallel.context_method

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all ranks that hold tokens of their own, on every rank."""
        counts = self.mesh.rank("tensor") == 0  # the ranks of a tensor group hold the same tokens
        return self.world.sum(*(value if counts else 0.0 for value in values))

    def sum_over_samples(self, *values: float) -> list[float]:
        """The sum of each value over all ranks that hold samples of their own, on every rank."""
        counts = self.mesh.rank("context") == 0  # the ranks of a context group share the same samples
        return self.sum(*(value if counts else 0.0 for value in values))

    def count_trained(self, microbatches: Sequence[Arrays]) -> float:
        """Trained tokens of this step's global batch."""
        targets = (self._share(batch)[-1] for batch in microbatches)
        (trained,) = self.sum(sum(int((target != IGNORED).sum()) for target in targets))
        return trained

    def forward_backward(self, microbatches: Sequence[Arrays], trained: float) -> float:
        """Add up the gradients of a step's microbatches, each loss divided by `trained`; return all ranks' loss sum."""
        loss_sum = torch.zeros((), device=self.world.device.torch)
        for number, batch in enumerate(microbatches, start=1):
            communicate_after(self.model, number == len(microbatches), self._zero_stage)
            loss = self.loss(batch)
            with self._attention_kernel():  # for what backward computes again
                (loss / max(trained, 1)).backward()
            loss_sum += loss.detach()
        (total,) = self.sum(loss_sum.item())
        return total

    def loss(self, batch: Arrays) -> Tensor:
        """The summed token loss of a batch of this rank's, fp32 scalar in nats."""
        device = self.world.device.torch
        tensors = (None if array is None else array.to(device, non_blocking=True) for array in self._share(batch))
        with self._kernels():
            return self.model(*tensors)

    def _share(self, batch: Arrays) -> Arrays:
        """This rank's share of each sequence; documents stay whole, since attention crosses the shares."""
        ranks = self.mesh.size("context")
        if ranks == 1:
            return batch
        tokens, positions, document_ids, targets = batch
        shares = (
            take_share(whole, self._context_method, self.mesh.rank("context"), ranks)
            for whole in (tokens, positions, targets)
        )
        tokens, positions, targets = shares
        return tokens, positions, document_ids, targets

    @torch.no_grad()
    def evaluate(self, batch: Arrays) -> float:
        """This rank's part of a batch's summed token loss, without training anything."""
        self.model.eval()
        loss = self.loss(batch).item()
        self.model.train()
        return loss

    def clip_gradients(self, largest_norm: float) -> float:
        """See `shard.clip_gradients`."""
        return clip_gradients(self.model, largest_norm)

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """The type of the matrix products, and the kernel of attention."""
        device, dtype = self.world.device.torch.type, _AUTOCAST.get(self._precision)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None), self._attention_kernel():
            yield

    def _attention_kernel(self) -> AbstractContextManager:
        return sdpa_kernel(_KERNELS[self._attention])
