"""Muon and Adafactor look at whole matrices: the same steps on products of layouts as on one process."""

import pytest

from parallel.reference import assert_same_run, train
from ranks import run_ranks

ZERO3, TENSOR, RING = ["--parallel.zero-stage", "3"], ["--parallel.tensor", "2"], ["--parallel.context", "2"]
LAYOUTS = {
    "zero 3 x4": (4, ZERO3),
    "zero 2 in groups of 2": (4, ["--parallel.zero-stage", "2", "--parallel.hybrid", "2"]),
    "tensor 2 x zero 3": (4, [*TENSOR, *ZERO3]),
    "tensor 4": (4, ["--parallel.tensor", "4"]),
    "ring 2 x zero 3": (4, [*RING, *ZERO3]),
    "ulysses 2 x tensor 2": (4, [*RING, *TENSOR, "--parallel.context-method", "ulysses"]),
    "pipeline 2": (2, ["--parallel.pipeline", "2", "--train.gradient-accumulation-steps", "4"]),
}
OPTIMIZERS = {
    "muon": ["--train.optimizer.name", "muon"],
    "adafactor": ["--train.optimizer.name", "adafactor", "--train.optimizer.lr", "1e-2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_steps_on_every_product(optimizer, layout):
    ranks, flags = LAYOUTS[layout]
    options = [*OPTIMIZERS[optimizer], "--train.micro-batch-size", "2"]
    [alone] = run_ranks(1, train, "llama", options, 2, 0.1)
    assert_same_run(run_ranks(ranks, train, "llama", [*options, *flags], 2, 0.1), alone)
