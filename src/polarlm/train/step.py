"""One optimizer step: the global batch to a loss, to gradients, to new weights."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from polarlm.data import Batch
from polarlm.model import IGNORED, Transformer
from polarlm.parallel import World, clip_gradients, reduce_gradients_after

_AUTOCAST = {"bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    loss: float  # nats a trained token, over the global batch
    grad_norm: float  # before clipping, over the whole model
    asked_to_stop: bool  # some rank was


def train_step(
    model: Transformer,
    optimizer: Optimizer,
    microbatches: Sequence[Batch],
    world: World,
    *,
    precision: str,
    clip: float,
    asked_to_stop: bool = False,
) -> StepResult:
    """Take one step on this rank's microbatches of the global batch.

    The loss is the sum of token losses over the global batch divided by its trained tokens, which are counted before
    the first forward pass; so every reduction, over microbatches and over ranks, is a sum.

    Args:
        clip: largest gradient norm; 0 is no clipping.
        asked_to_stop: whether this rank was; it rides on the exchange of the loss.
    """
    trained = sum(int((batch.targets != IGNORED).sum()) for batch in microbatches)
    (trained_globally,) = world.sum(trained)
    loss_sum = torch.zeros((), device=world.device.torch)
    for number, batch in enumerate(microbatches, start=1):
        reduce_gradients_after(model, number == len(microbatches))
        batch_loss = forward_loss(model, batch, world, precision)
        (batch_loss / max(trained_globally, 1)).backward()
        loss_sum += batch_loss.detach()
    grad_norm = clip_gradients(model, clip)
    optimizer.step()
    optimizer.zero_grad()
    loss_globally, stops = world.sum(loss_sum.item(), float(asked_to_stop))
    return StepResult(loss_globally / max(trained_globally, 1), grad_norm, stops > 0)


def forward_loss(model: Transformer, batch: Batch, world: World, precision: str) -> torch.Tensor:
    """The summed token loss of a batch of this rank's, fp32 scalar in nats."""
    device = world.device.torch
    arrays = (batch.tokens, batch.positions, batch.document_ids, batch.targets)
    tensors = (None if array is None else torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    with _matrix_products_in(precision, device):
        return model(*tensors)


def _matrix_products_in(precision: str, device: torch.device) -> AbstractContextManager:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[precision])
