"""A feed-forward that takes a sequence tile by tile gives the same gradients, on any layout, and holds less."""

import pytest
import torch

from parallel.allocations import Allocations
from parallel.reference import rank_batches, run_config, whole
from polarlm.parallel import Device, Engine, World
from polarlm.train.step import as_tensors
from ranks import run_ranks

ALONE = World(0, 1, Device(torch.device("cpu")))
LAYOUTS = {
    "alone": (1, []),
    "zero 3": (2, ["--parallel.zero-stage", "3"]),
    "tensor 2": (2, ["--parallel.tensor", "2"]),
    "ring 2": (2, ["--parallel.context", "2"]),
    "pipeline 2": (
        2,
        ["--parallel.pipeline", "2", "--train.micro-batch-size", "2", "--train.gradient-accumulation-steps", "4"],
    ),
}
LAYOUTS["backward in two parts"] = (
    2,
    [*LAYOUTS["pipeline 2"][1], "--parallel.pipeline-schedule", "zbvzerobubble", "--model.layers", "4"],
)


def _gradients(world, family, flags, ways):
    found = []
    for way in ways:
        engine = Engine(run_config(family, world.size, [*flags, *way]), world)
        batches = [as_tensors(batch) for batch in rank_batches(0, engine.data_rank, engine.data_ranks, 2, True)]
        loss = engine.forward_backward(batches, 100.0)
        found.append((loss, {name: whole(parameter.grad) for name, parameter in engine.model.named_parameters()}))
    return found


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_same(layout, family):
    ranks, flags = LAYOUTS[layout]
    tiles = [["--train.tile", tile] for tile in ("5", "8")]
    ways = [[], *tiles, [*tiles[0], "--train.recompute", "full", "--train.offload-activations", "host"]]
    for (loss, gradients), *others in run_ranks(ranks, _gradients, family, flags, ways):
        for other_loss, other_gradients in others:
            assert other_loss == pytest.approx(loss, rel=1e-6)
            # Some, such as of the keys' biases, are 0 but for rounding.
            least = 1e-3 * max(gradient.norm() for gradient in gradients.values())
            for name, gradient in gradients.items():
                assert (other_gradients[name] - gradient).norm() <= 1e-6 * max(gradient.norm(), least), name


def _peak(flags):
    """Most bytes of a forward and backward pass beside parameters, gradients and inputs, of a wide feed-forward."""
    shape = ["--train.seq-len", "256", "--model.layers", "2", "--model.ffn", "1024", "--model.max-positions", "256"]
    engine = Engine(run_config("llama", 1, [*shape, *flags]), ALONE)
    tokens = torch.arange(256).view(1, -1) % 61
    batch = tokens, torch.arange(256).view(1, -1), None, tokens
    engine.forward_backward([batch], 256.0)
    with Allocations() as allocations:
        engine.forward_backward([batch], 256.0)
        return allocations.peak


def test_only_a_tiles_intermediates_are_held():
    plain, tiled = _peak(["--train.recompute", "full"]), _peak(["--train.recompute", "full", "--train.tile", "32"])
    # gate, its activation, up and their product, and a gradient of each at most, of 256 tokens or of 32
    width = 4 * 256 * 1024
    assert plain > 4 * width
    assert tiled < plain - 3 * width


def _feed_forwards(flags):
    """How often each token passes the feed-forward in a step's forward and backward."""
    engine = Engine(run_config("llama", 1, ["--train.seq-len", "32", "--model.layers", "1", *flags]), ALONE)
    seen = []
    for block in engine.model.blocks.values():
        block.feed_forward.up.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    tokens = torch.arange(32).view(1, -1) % 61
    engine.forward_backward([(tokens, torch.arange(32).view(1, -1), None, tokens)], 32.0)
    return sum(seen) / 32


def test_how_often_it_is_computed():
    assert _feed_forwards([]) == 1
    assert _feed_forwards(["--train.tile", "8"]) == 2
    assert _feed_forwards(["--train.recompute", "full"]) == 2
    # Once more in all, but for the last tile, whose first repetition nothing asks for.
    assert _feed_forwards(["--train.tile", "8", "--train.recompute", "full"]) == 2.75
