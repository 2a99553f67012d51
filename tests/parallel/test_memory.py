"""What a rank holds under each ZeRO stage, every storage counted, against what the paper says of the stage.

Few tokens go through a model of many small blocks, so that what a block needs for a moment, and activations, are little
beside the states.
"""

import functools

import pytest
import torch

from parallel.allocations import Allocations
from parallel.reference import run_config
from polarlm.parallel import Engine
from polarlm.plan import buffer_bytes, count_parameters, state_bytes
from polarlm.train import build_optimizer
from ranks import run_ranks

SHAPE = ["--model.layers", "12", "--model.hidden", "64", "--train.seq-len", "2"]
BF16 = ["--train.precision", "bf16", "--train.parameter-precision", "bf16"]
LAYOUTS = {  # ranks, flags, ranks that share out
    "zero 0": (4, ["--parallel.zero-stage", "0"], 1),
    **{f"zero {stage}": (4, ["--parallel.zero-stage", str(stage)], 4) for stage in (1, 2, 3)},
    **{
        f"zero {stage} in groups of 2": (4, ["--parallel.zero-stage", str(stage), "--parallel.hybrid", "2"], 2)
        for stage in (2, 3)
    },
    "zero 1 in bf16": (4, ["--parallel.zero-stage", "1", *BF16], 4),
}


def _measure(world, flags):
    """Bytes between steps, after a backward pass, and at the peak of a step of two microbatches."""
    config = run_config("llama", world.size, [*SHAPE, *flags])
    tokens = torch.tensor([[3, 5]])
    batch = tokens, torch.arange(2)[None], None, tokens
    with Allocations() as allocations:
        engine = Engine(config, world)
        optimizer = build_optimizer(engine.model, config.train.optimizer)
        engine.forward_backward([batch], 4.0)
        optimizer.step()
        optimizer.zero_grad()
        between, allocations.peak = allocations.bytes_alive(), 0
        engine.forward_backward([batch] * 2, 4.0)
        return between, allocations.bytes_alive(), allocations.peak


@functools.cache
def _activation_bytes():
    """Beside the states, at the peak of a step on one process."""
    [(between, after_backward, peak)] = run_ranks(1, _measure, [])
    parameters = count_parameters(run_config("llama", 1, SHAPE).model)
    assert between == pytest.approx(12 * parameters, rel=0.001)
    assert after_backward == pytest.approx(state_bytes(parameters, 0, 1, parameter=0).total, rel=0.001)
    return peak - after_backward


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_holds_more_than_the_paper_says(layout):
    ranks, flags, shards = LAYOUTS[layout]
    config = run_config("llama", ranks, [*SHAPE, *flags])
    parameters, stage = count_parameters(config.model), config.parallel.zero_stage
    parameter = 0 if shards == 1 else 2 if flags[-2:] == BF16[-2:] else 4
    states = state_bytes(parameters, stage, shards, parameter=parameter)
    block = (parameters - 2 * 61 * 64) // 12
    for between, after_backward, peak in run_ranks(ranks, _measure, flags):
        assert between == pytest.approx(states.optimizer, rel=0.005)
        assert after_backward == pytest.approx(states.optimizer + 4 * parameters / shards, rel=0.005)
        gathered = 0 if stage == 3 else states.parameters  # stage 3 never has all of its own part twice
        assert peak > gathered + states.gradients + states.optimizer
        assert peak < gathered + states.gradients + states.optimizer + buffer_bytes(block) + _activation_bytes()


def _measure_start(world, flags):
    """Bytes at the peak of building a model, and those of this rank's part."""
    config = run_config("llama", world.size, [*SHAPE, *flags])
    with Allocations() as allocations:
        engine = Engine(config, world)
        held = allocations.bytes_alive()
    largest = max(parameter.numel() for parameter in engine.model.parameters())
    return allocations.peak, held, 4 * largest


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_start_holds_one_whole_parameter_and_no_more(ranks, tensor):
    parameters = count_parameters(run_config("llama", 1, SHAPE).model)
    flags = ["--parallel.zero-stage", "3", "--parallel.tensor", str(tensor)]
    for peak, held, largest in run_ranks(ranks, _measure_start, flags):
        assert held == pytest.approx(4 * parameters / ranks, rel=0.03)  # norms are whole on each tensor rank
        assert held < peak < held + 1.01 * largest
