"""One optimizer step: the global batch to a loss, to gradients, to new weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from polarlm.data import Batch
from polarlm.parallel import Arrays, Engine
from polarlm.train.sources import SourceLosses
from polarlm.train.steady import FaultOf


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank."""

    loss: float  # nats a trained token, over the global batch
    grad_norm: float  # before clipping, over the whole model
    asked_to_stop: bool  # some rank was
    loss_of_source: dict[str, float] = field(default_factory=dict)
    fault: str | None = None  # why it was not taken, and left the weights and moments alone


def train_step(
    engine: Engine,
    optimizer: Optimizer,
    microbatches: Sequence[Batch],
    *,
    clip: float,
    asked_to_stop: bool = False,
    sources: SourceLosses | None = None,
    fault_of: FaultOf = lambda loss, grad_norm: None,
    loss_scale: float = 1.0,
) -> StepResult:
    """Take one step on this rank's microbatches of the global batch.

    The loss is the sum of token losses over the global batch divided by its trained tokens, which are counted before
    the first forward pass; so every reduction, over microbatches and over ranks, is a sum.

    Args:
        clip: largest gradient norm; 0 is no clipping.
        asked_to_stop: whether this rank was.
        sources: tells the loss of each dataset, too.
        fault_of: looks at loss and gradient norm before anything is changed by them.
        loss_scale: what the loss is multiplied by for the backward pass alone.
    """
    sources = sources or SourceLosses(engine, [])
    sources.begin()
    batches = [as_tensors(batch) for batch in microbatches]
    trained = engine.count_trained(batches)
    loss_sum = engine.forward_backward(batches, trained, loss_scale)
    grad_norm = engine.clip_gradients(clip, loss_scale)
    loss = loss_sum / max(trained, 1)
    fault = fault_of(loss, grad_norm)
    if fault is None:
        optimizer.step()
    optimizer.zero_grad()
    stops, *source_sums = engine.world.sum(float(asked_to_stop), *sources.sums(microbatches))
    return StepResult(loss, grad_norm, stops > 0, sources.means(source_sums), fault)


def as_tensors(batch: Batch) -> Arrays:
    """The arrays of a batch as tensors that share their memory, in the order of the model's arguments."""
    document_ids = None if batch.document_ids is None else torch.from_numpy(batch.document_ids)
    return (
        torch.from_numpy(batch.tokens),
        torch.from_numpy(batch.positions),
        document_ids,
        torch.from_numpy(batch.targets),
    )
