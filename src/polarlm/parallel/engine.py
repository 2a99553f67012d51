"""A run's model on its mesh, as the training step sees it: no axis shows through."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polarlm.config import RunConfig
from polarlm.model import IGNORED
from polarlm.parallel.build import build_stages
from polarlm.parallel.context import take_share
from polarlm.parallel.kernels import attention_kernel, choose_kernel
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.pipeline import Arrays, Pipeline, join
from polarlm.parallel.replicas import Replicas
from polarlm.parallel.shard import Shards, clip_gradients, is_shared_out
from polarlm.parallel.world import World


class Engine:
    """This rank's part of a model, and how to run it with the others.

    Attributes:
        model: this rank's part; parameters may be shards, their names are those of one process.
        data_rank, data_ranks: which part of each global batch this rank's samples are.
        kernel: what computes attention: `flash`, `cudnn`, `efficient` or `math`.
        dropout_rank: ranks that must draw different dropout have different numbers.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.kernel = choose_kernel(config, world.device)
        self.world = world
        self.mesh = Mesh(config.parallel, world)
        stages = build_stages(config, self.mesh)
        self.model = stages[min(stages)] if len(stages) == 1 else join(list(stages.values()))
        self._pipeline = Pipeline(config, self.mesh, stages) if self.mesh.size("pipeline") > 1 else None
        self.data_rank, self.data_ranks = self.mesh.rank("data"), self.mesh.size("data")
        self.dropout_rank = world.rank
        self._gradients = (
            Shards(self.model, config.parallel.zero_stage)
            if is_shared_out(config.parallel)
            else Replicas(self.model, self.mesh)
        )
        self._attention = config.train.attention

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all ranks that hold tokens of their own, on every rank."""
        # The ranks of a tensor group hold the same tokens; of a pipeline, the last stage's rank has their loss.
        counts = self.mesh.rank("tensor") == 0 and (self._pipeline is None or self._pipeline.has_loss)
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

    def forward_backward(self, microbatches: Sequence[Arrays], trained: float, loss_scale: float = 1.0) -> float:
        """Add up the gradients of a step's microbatches, each loss divided by `trained` and multiplied by `loss_scale`,
        which `clip_gradients` undoes; return all ranks' loss sum."""
        divisor = max(trained, 1) / loss_scale
        self.model.loss.gradient_scale = 2.0 ** -round(math.log2(divisor))
        with self._attention_kernel():  # in backward too, for what is computed again there
            if self._pipeline is None:
                loss_sum = self._one_after_another(microbatches, divisor)
            else:
                loss_sum = self._pipeline.forward_backward([self._on_device(batch) for batch in microbatches], divisor)
        self._gradients.finish()
        if self._pipeline is not None:
            self._pipeline.sum_tied_gradients()
        (total,) = self.sum(loss_sum.item())
        return total

    def _one_after_another(self, microbatches: Sequence[Arrays], divisor: float) -> Tensor:
        loss_sum = torch.zeros((), device=self.world.device.torch)
        for number, batch in enumerate(microbatches, start=1):
            self._gradients.before_microbatch(is_last=number == len(microbatches))
            loss = self.loss(batch)
            (loss / divisor).backward()
            loss_sum += loss.detach()
        return loss_sum

    def loss(self, batch: Arrays) -> Tensor:
        """The summed token loss of a batch of this rank's, fp32 scalar in nats; without a pipeline."""
        with self._attention_kernel():
            return self.model(*self._on_device(batch))

    def _on_device(self, batch: Arrays) -> Arrays:
        device = self.world.device.torch
        tokens, positions, document_ids, targets = self._share(batch)
        tokens, positions, targets = (array.to(device, non_blocking=True) for array in (tokens, positions, targets))
        return tokens, positions, document_ids, targets  # where documents begin is read on the host

    def _share(self, batch: Arrays) -> Arrays:
        """This rank's share of each sequence; documents stay whole, since attention crosses the shares."""
        if self.mesh.size("context") == 1:
            return batch
        tokens, positions, document_ids, targets = batch
        place = self.mesh.rank("context"), self.mesh.size("ring"), self.mesh.size("ulysses")
        tokens, positions, targets = (take_share(whole, *place) for whole in (tokens, positions, targets))
        return tokens, positions, document_ids, targets

    @torch.no_grad()
    def evaluate(self, batch: Arrays) -> float:
        """This rank's part of a batch's summed token loss, without training anything."""
        self.model.eval()
        with self._attention_kernel():
            loss = self.loss(batch) if self._pipeline is None else self._pipeline.evaluate(self._on_device(batch))
        self.model.train()
        return loss.item()

    def clip_gradients(self, largest_norm: float, loss_scale: float = 1.0) -> float:
        """See `shard.clip_gradients`."""
        return clip_gradients(self.model, largest_norm, self.mesh, loss_scale)

    def _attention_kernel(self) -> AbstractContextManager:
        return attention_kernel(self._attention)
