"""Loss scaling: exact on every axis where nothing is lost to fp16, and in fp16 the same training as one process's."""

import pytest
import torch

from parallel.reference import train
from ranks import run_ranks

MICRO = 2
INTERLEAVED = "--parallel.pipeline 2 --parallel.pipeline-schedule interleaved1f1b --model.layers 4"
LAYOUTS = {
    "alone": "",
    "zero 0": "--parallel.ranks 2",
    "zero 1": "--parallel.ranks 2 --parallel.zero-stage 1",
    "zero 2": "--parallel.ranks 2 --parallel.zero-stage 2",
    "zero 3": "--parallel.ranks 2 --parallel.zero-stage 3",
    "offloaded": "--parallel.ranks 2 --parallel.zero-stage 3 --parallel.offload parameters",
    "tensor": "--parallel.tensor 2",
    "1f1b": "--parallel.pipeline 2",
    "interleaved": INTERLEAVED,
    "zero bubble": INTERLEAVED.replace("interleaved1f1b", "zbvzerobubble"),
    "ring": "--parallel.context 2",
    "ulysses": "--parallel.context 2 --parallel.context-method ulysses",
}
LARGE = 2.0**12  # enough that gradients of 1e-8 are numbers of fp16, and not so large that any overflows
CLIP = 0.5  # of a norm near 1: it acts


@pytest.fixture(scope="module")
def alone():
    """One process's steps in fp16, by the number of layers."""
    found = {}

    def steps(layers):
        if layers not in found:
            [found[layers]] = run_ranks(1, _in_fp16, ["--model.layers", layers])
        return found[layers]

    return steps


def _in_fp16(world, flags):
    return train(world, "llama tied", [*_of_rank(flags), "--train.precision", "fp16"], MICRO, CLIP, loss_scale=LARGE)


def _of_rank(flags):
    return [*flags, "--train.micro-batch-size", str(MICRO)]


def _three_ways(world, flags):
    plain, scaled = (
        train(world, "llama tied", _of_rank(flags), MICRO, CLIP, loss_scale=scale) for scale in (1.0, LARGE)
    )
    return plain, scaled, _in_fp16(world, flags)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaling_changes_no_bit_in_fp32_and_fp16_stays_with_one_process(layout, alone):
    flags = LAYOUTS[layout].split()
    steps, gradients, weights = alone("4" if "--model.layers" in flags else "2")
    for plain, scaled, half in run_ranks(1 if layout == "alone" else 2, _three_ways, flags):
        assert scaled[0] == plain[0]
        for found, expected in zip(scaled[1:], plain[1:], strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
        assert 0 < max(abs(a / b - 1) for a, b in zip(_flat(half[0]), _flat(plain[0]), strict=True)) < 1e-3
        # fp16 keeps 11 bits: what is added up in another order is off by 2^-12 of itself, and so for some ten products.
        torch.testing.assert_close(torch.tensor(half[0]), torch.tensor(steps), rtol=1e-4, atol=0)
        _assert_near(half[1], gradients, 10 * 2**-12)
        _assert_near(half[2], weights, 5e-3)


def _flat(steps):
    return [number for step in steps for number in step]


def _assert_near(found, expected, bound):
    for name, value in found.items():
        right = expected[name if name in expected else "embedding.tokens.weight"]  # a last stage's tied head
        difference = (value - right).norm() / right.norm()
        assert difference <= bound, f"{name}: {difference:.1e}"  # false for NaN too
