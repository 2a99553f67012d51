"""What the engine saves under one layout goes on under another, pipelines and tied embeddings included."""

import pytest
import torch

from parallel.reference import rank_batches, run_config, whole
from polarlm.checkpoint import Checkpoints
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from ranks import run_ranks

FOUR = "--model.layers 4 --model.vocab-size 67 --train.micro-batch-size 2"  # a vocabulary that no two ranks can halve
PIPELINE = "--train.gradient-accumulation-steps 4 --parallel.pipeline 2 --parallel.pipeline-schedule"
LAYOUTS = {
    "one process": (1, ""),
    "zero 3 x4": (4, "--parallel.zero-stage 3"),
    "tensor 2": (2, "--parallel.tensor 2"),
    "interleaved": (2, f"{PIPELINE} interleaved1f1b"),
    "both ends on one rank": (2, f"{PIPELINE} zbvzerobubble"),
    "zero 3 x tensor 2 x 1f1b": (
        8,
        "--parallel.zero-stage 3 --parallel.tensor 2 --parallel.pipeline 2 --train.gradient-accumulation-steps 2",
    ),
}


def _open(world, flags):
    config = run_config("gpt", world.size, [*FOUR.split(), *flags.split()])
    engine = Engine(config, world)
    return engine, build_optimizer(engine.model, config.train.optimizer)


def _steps(engine, optimizer, numbers):
    return [
        train_step(engine, optimizer, rank_batches(n, engine.data_rank, engine.data_ranks, 2), clip=0.1).loss
        for n in numbers
    ]


def _save(world, folder, flags):
    engine, optimizer = _open(world, flags)
    _steps(engine, optimizer, [0, 1])
    Checkpoints(folder, 1, world).save(2, engine.model, optimizer, {})
    return _steps(engine, optimizer, [2, 3])


def _go_on(world, folder, flags):
    engine, optimizer = _open(world, flags)
    engine.evaluate(tuple(map(torch.from_numpy, _evaluation())))  # leaves parameters gathered, which loading must mend
    Checkpoints(folder, 1, world).load(2, engine.model, optimizer)
    weights = {engine.model.copies.get(n, n): whole(p) for n, p in engine.model.named_parameters()}
    return _steps(engine, optimizer, [2, 3]), weights


def _evaluation():
    batch = rank_batches(0, 0, 1, 8)[0]
    return batch.tokens[:2], batch.positions[:2], batch.positions[:2] * 0, batch.targets[:2]


@pytest.mark.parametrize("saved", LAYOUTS)
def test_a_checkpoint_of_any_layout_goes_on_under_any_other(saved, tmp_path):
    ranks, flags = LAYOUTS[saved]
    straight = run_ranks(ranks, _save, tmp_path, flags)[0]
    [(_, first)] = run_ranks(1, _go_on, tmp_path, "")
    for other, (ranks, flags) in LAYOUTS.items():
        held = {}
        for losses, weights in run_ranks(ranks, _go_on, tmp_path, flags):
            assert losses == (straight if other == saved else pytest.approx(straight, rel=1e-5)), other
            assert all(torch.equal(value, first[name]) for name, value in weights.items()), other
            held |= weights
        assert held.keys() == first.keys()
