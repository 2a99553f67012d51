"""Recomputation changes no gradient, on any layout, and keeps fewer bytes."""

import pytest
import torch

from parallel.allocations import Allocations
from parallel.reference import rank_batches, run_config, whole
from polarlm.parallel import Device, Engine, World
from polarlm.train.step import as_tensors
from ranks import run_ranks

DROPOUT = ["--model.dropout", "0.3"]
ZERO3, ULYSSES = ["--parallel.zero-stage", "3"], ["--parallel.context-method", "ulysses"]
PIPELINE = ["--parallel.pipeline", "2", "--train.micro-batch-size", "2", "--train.gradient-accumulation-steps", "4"]
FULL_ON_HOST = ["--train.recompute", "full", "--train.offload-activations", "host"]
LAYOUTS = {
    "alone": (1, DROPOUT),
    "zero 3": (2, [*ZERO3, *DROPOUT]),
    "tensor 2": (2, ["--parallel.tensor", "2", *DROPOUT]),
    "ring 2": (2, ["--parallel.context", "2"]),  # ring attention has no dropout
    "ulysses 2": (2, ["--parallel.context", "2", *ULYSSES, *DROPOUT]),
    "pipeline 2": (2, [*PIPELINE, *DROPOUT]),
}


def _gradients(world, family, flags, recomputes, packed):
    """Two steps' loss sums and gradients for each way to recompute, all from the same dropout."""
    found = []
    for recompute in recomputes:
        engine = Engine(run_config(family, world.size, [*flags, *recompute]), world)
        torch.manual_seed(world.rank)
        batches = [as_tensors(b) for b in rank_batches(0, engine.data_rank, engine.data_ranks, 2, packed)]
        losses = [engine.forward_backward(batches, 100.0) for _ in range(2)]
        found.append((losses, {name: whole(p.grad) for name, p in engine.model.named_parameters()}))
    return found


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_the_same_to_the_bit(layout, family):
    ranks, flags = LAYOUTS[layout]
    ways = [
        ["--train.recompute", "none"],
        ["--train.recompute", "selective"],
        ["--train.recompute", "full"],
        ["--train.recompute", "full", "--train.recompute-every", "2"],
        FULL_ON_HOST,
        [*FULL_ON_HOST, "--train.recompute-every", "2"],
    ]
    for found in run_ranks(ranks, _gradients, family, flags, ways, family == "llama"):
        (losses, gradients), *others = found
        for way, (other_losses, other_gradients) in zip(ways[1:], others, strict=True):
            assert other_losses == losses, way
            assert other_gradients.keys() == gradients.keys()
            assert all(torch.equal(other_gradients[name], gradients[name]) for name in gradients), way


def test_full_goes_with_a_backward_pass_in_two_parts():
    split = [*PIPELINE, "--parallel.pipeline-schedule", "zbvzerobubble", "--model.layers", "4"]
    ways = [["--train.recompute", "none"], ["--train.recompute", "full"], FULL_ON_HOST]
    for (losses, gradients), *others in run_ranks(2, _gradients, "llama", split, ways, False):
        for other_losses, other_gradients in others:
            assert other_losses == losses
            assert all(torch.equal(other_gradients[name], gradients[name]) for name in gradients)


def test_what_is_computed_again_uses_the_kernel_that_was_asked_for():
    plain = ["--train.attention", "math"]
    ways = [["--train.recompute", mode, *plain] for mode in ("none", "selective", "full")]
    [[(losses, gradients), *others]] = run_ranks(1, _gradients, "llama", [], ways, False)
    for other_losses, other_gradients in others:
        assert other_losses == losses
        assert all(torch.equal(other_gradients[name], gradients[name]) for name in gradients)


def _kept_bytes(flags, seq_len=64):
    """Bytes that live from a forward pass to its backward pass."""
    config = run_config("llama", 1, ["--train.seq-len", str(seq_len), "--model.layers", "4", *flags])
    engine = Engine(config, World(0, 1, Device(torch.device("cpu"))))
    tokens = torch.arange(2 * seq_len).view(2, -1) % 61
    batch = tokens, torch.arange(seq_len).expand(2, -1), None, tokens
    with Allocations() as allocations:
        loss = engine.loss(batch)  # alive, and with it all that its backward pass needs
        assert loss.requires_grad
        return allocations.bytes_alive()


def test_more_recomputation_keeps_fewer_bytes():
    none = _kept_bytes([])
    selective = _kept_bytes(["--train.recompute", "selective"])
    full = _kept_bytes(["--train.recompute", "full"])
    every_second = _kept_bytes(["--train.recompute", "full", "--train.recompute-every", "2"])
    assert none > 1.3 * selective > 1.3**2 * full, (none, selective, full)
    assert every_second == pytest.approx((none + full) / 2, rel=0.01)


def test_selective_keeps_what_the_weights_products_give_and_no_scores():
    # A block: its input H, q and the output H each, k and v H/2 each, gate, up F each, down H; of each of 4 bytes.
    full, selective = (_kept_bytes(["--train.recompute", mode]) for mode in ("full", "selective"))
    math = _kept_bytes(["--train.recompute", "selective", "--train.attention", "math"])
    ffn = run_config("llama", 1).model.ffn
    assert selective - full == 4 * 4 * 2 * 64 * (4 * 32 + 2 * ffn)
    assert math == selective
