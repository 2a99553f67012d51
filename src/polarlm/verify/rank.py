"""One rank of one layout: the steps of training, watched, and compared with the reference."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polarlm.config import RunConfig
from polarlm.parallel import Engine, TrafficCounter, World, join_world
from polarlm.train import build_optimizer, train_step
from polarlm.verify.batches import microbatches
from polarlm.verify.compare import differences, merge, relative, worst
from polarlm.verify.meeting import Seat
from polarlm.verify.reference import STEPS, Reference, loss_scale_of
from polarlm.verify.rows import Row
from polarlm.verify.traffic import TrafficRow, compare_amounts


def in_world(seat: Seat, ranks: int, task: Callable[[World], object]) -> object:
    """Meet the other ranks and do `task` with them; for a process that has just been forked."""
    torch.set_num_threads(max(1, torch.get_num_threads() // seat.neighbours))
    place = seat.rank, ranks, seat.local_rank, seat.address, seat.port, seat.listen_fd
    with join_world(*place) as world:
        return task(world)


class WatchedEngine(Engine):
    """The engine, which shows its gradients just before they are clipped for the first time."""

    def __init__(self, config: RunConfig, world: World, show: Callable[[nn.Module, float], None]) -> None:
        """
        Args:
            show: is given the model, and the loss scale that its gradients hold.
        """
        super().__init__(config, world)
        self._show: Callable[[nn.Module, float], None] | None = show

    def clip_gradients(self, largest_norm: float, loss_scale: float = 1.0) -> float:
        """See `Engine`."""
        if self._show:
            self._show(self.model, loss_scale)
            self._show = None
        return super().clip_gradients(largest_norm, loss_scale)


def try_layout(world: World, layout: str, model: str, config: RunConfig, reference: Reference, bound: float) -> Row:
    """Train `STEPS` steps as `polarlm train` does; the same row on every rank, with the worst of all of them."""
    start = time.monotonic()
    gradients: dict[str, float] = {}

    def compare_gradients(module: nn.Module, loss_scale: float) -> None:
        whole = _whole(module, lambda parameter: parameter.grad)
        unscaled = ((name, None if gradient is None else gradient / loss_scale) for name, gradient in whole)
        gradients.update(differences(unscaled, reference.gradients))

    engine = WatchedEngine(config, world, compare_gradients)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    results = []
    for step in range(STEPS):
        batches = microbatches(config, step, engine.data_rank, engine.data_ranks)
        step_fields = {"clip": config.train.optimizer.clip, "loss_scale": loss_scale_of(config)}
        results.append(train_step(engine, optimizer, batches, **step_fields))
    weights = differences(_whole(engine.model, lambda parameter: parameter), reference.weights)
    # The last stage of a tied model holds a copy of the embedding, under a name that one process does not have.
    ignored = ["head.weight"] if config.model.tied_embeddings else []
    return Row(
        layout=layout,
        model=model,
        ranks=world.size,
        bound=bound,
        loss=worst(world.gather(relative([result.loss for result in results], reference.losses))),
        norm=worst(world.gather(relative([result.grad_norm for result in results], reference.norms))),
        gradients=merge(world.gather(gradients), reference.gradients, ignored),
        weights=merge(world.gather(weights), reference.weights, ignored),
        seconds=time.monotonic() - start,
    )


def count_layout(world: World, layout: str, model: str, config: RunConfig) -> TrafficRow:
    """Count what all ranks send in a training step; the same row on every rank."""
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    batches = microbatches(config, 0, engine.data_rank, engine.data_ranks)
    train_step(engine, optimizer, batches, clip=config.train.optimizer.clip)  # the first one opens connections, too
    with TrafficCounter(engine.mesh) as counter:
        train_step(engine, optimizer, batches, clip=config.train.optimizer.clip)
    calls, sizes = (_add_up(world.gather(counts)) for counts in (counter.calls, counter.bytes))
    return TrafficRow(layout, model, world.size, compare_amounts(config, calls, sizes))


def _add_up(of_ranks: list[dict]) -> dict:
    return {key: sum(rank.get(key, 0) for rank in of_ranks) for rank in of_ranks for key in rank}


def _whole(module: nn.Module, choose: Callable[[nn.Parameter], Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
    """Each parameter of this rank, or its gradient, whole; the ranks that share one out all take part."""
    for name, parameter in module.named_parameters():
        tensor = choose(parameter)
        tensor = None if tensor is None else tensor.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
