"""Two data-parallel ranks against one process, with a reference loop that shares nothing with the engine."""

import pytest
import torch

from parallel.reference import assert_same_run, plain_steps, rank_batches, run_config, train, whole
from polarlm.model import IGNORED, Transformer, initialise
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from ranks import run_ranks

LAYOUTS = {  # ranks and flags of a layout
    "alone": (1, []),
    "zero 0 x2": (2, []),
    "zero 0 x4": (4, []),
    **{
        f"zero {stage} x{ranks}": (ranks, ["--parallel.zero-stage", str(stage)])
        for stage in (1, 2, 3)
        for ranks in (2, 4)
    },
    **{
        f"zero {stage} in groups of 2, x4": (4, ["--parallel.zero-stage", str(stage), "--parallel.hybrid", "2"])
        for stage in (1, 2, 3)
    },
    "tensor 2": (2, ["--parallel.tensor", "2"]),
    "tensor 4": (4, ["--parallel.tensor", "4"]),
    "tensor 2 x zero 3 x2": (4, ["--parallel.tensor", "2", "--parallel.zero-stage", "3"]),
    "ulysses 2": (2, ["--parallel.context", "2", "--parallel.context-method", "ulysses"]),
    "ring 2": (2, ["--parallel.context", "2"]),
    "ring 4": (4, ["--parallel.context", "4"]),
    "ulysses 4, zero 3": (
        4,
        ["--parallel.context", "4", "--parallel.context-method", "ulysses", "--parallel.zero-stage", "3"],
    ),
    "ring 2 x tensor 2": (4, ["--parallel.context", "2", "--parallel.tensor", "2"]),
    "ulysses 2 x tensor 2": (
        4,
        ["--parallel.context", "2", "--parallel.tensor", "2", "--parallel.context-method", "ulysses"],
    ),
    "hybrid 2 x 2": (
        4,
        ["--parallel.context", "4", "--parallel.context-method", "hybrid", "--parallel.context-ulysses", "2"],
    ),
    "ring 2 x zero 3 x2": (4, ["--parallel.context", "2", "--parallel.zero-stage", "3"]),
    "zero 3 x2 in host memory": (2, ["--parallel.zero-stage", "3", "--parallel.offload", "parameters"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "micro"), [("gpt", 1), ("llama", 2), ("llama tied", 1)])
def test_every_layout_takes_the_same_steps(family, layout, micro):
    ranks, flags = LAYOUTS[layout]
    clip = 0.1  # small enough to act, so a wrong norm shows in the weights
    assert_same_run(run_ranks(ranks, train, family, flags, micro, clip), plain_steps(family, clip))


@pytest.mark.parametrize("layout", ["zero 0 x2", "zero 3 x2", "tensor 2", "ring 2"])
@pytest.mark.parametrize(
    "options",
    [
        ["--train.optimizer.name", "muon"],
        ["--train.optimizer.name", "adafactor", "--train.optimizer.lr", "1e-2"],
        ["--train.z-loss", "1e-2", "--train.label-smoothing", "0.1"],
    ],
)
def test_every_option_is_the_same_on_every_layout(layout, options):
    ranks, flags = LAYOUTS[layout]
    [alone] = run_ranks(1, train, "llama", options, 2, 0.1)
    assert_same_run(run_ranks(ranks, train, "llama", [*flags, *options], 2, 0.1), alone)


def _dropout_masks(world, seed):
    from polarlm.train.run import seed_dropout

    seed_dropout(seed, 1, world.rank)
    return torch.nn.functional.dropout(torch.ones(1000), 0.5)


def test_dropout_differs_between_data_parallel_ranks_and_repeats():
    first, second = run_ranks(2, _dropout_masks, 7), run_ranks(2, _dropout_masks, 7)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert 0.4 < (first[0] != first[1]).float().mean() < 0.6


def _initial_weights(world):
    model = Engine(run_config("gpt", world.size), world).model
    return {n: whole(p) for n, p in model.named_parameters()}


def test_the_start_is_the_same_on_any_number_of_ranks():
    config = run_config("gpt", 1)
    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    for ranks in (1, 2):
        for weights in run_ranks(ranks, _initial_weights):
            assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


def test_a_window_without_trained_tokens_is_no_division_by_zero():
    [(loss, norm)] = run_ranks(1, _train_on_nothing)
    assert (loss, norm) == (0.0, 0.0)


def _train_on_nothing(world):
    config = run_config("llama", 1)
    engine = Engine(config, world)
    batch = rank_batches(0, 0, 1, 8)[0]
    batch.targets[:] = IGNORED
    result = train_step(engine, build_optimizer(engine.model, config.train.optimizer), [batch], clip=1.0)
    return result.loss, result.grad_norm
