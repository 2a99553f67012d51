"""Dropout on many ranks: each drops for itself what it alone holds, as often as asked, and the same after a resume.

Nothing that is dropped is held by two ranks alike: data-parallel ranks have other samples, and the ranks of a context
or tensor group, which runs sequence parallel, other tokens or heads.
"""

from itertools import combinations

import pytest
import torch

from parallel.reference import SEQ, rank_batches, run_config
from polarlm.checkpoint import Checkpoints
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from polarlm.train.run import seed_dropout
from polarlm.train.step import as_tensors
from ranks import run_ranks

HALF = ["--model.dropout", "0.5"]
ULYSSES = ["--parallel.context", "2", "--parallel.context-method", "ulysses"]
LAYOUTS = {
    "data 2": (2, []),
    "tensor 2": (2, ["--parallel.tensor", "2"]),
    "ulysses 2": (2, ULYSSES),
    "ulysses 2 x zero 3 x2": (4, [*ULYSSES, "--parallel.zero-stage", "3"]),
    "tensor 2 x data 2": (4, ["--parallel.tensor", "2"]),
}


def _kept(world, flags, steps):
    """What the embedding's and each block's dropout kept in each step: bool, by step and place."""
    config = run_config("gpt", world.size, [*flags, *HALF])
    engine = Engine(config, world)
    kept = []

    def see(module, inputs, output):
        assert inputs[0].shape[1] == SEQ // (config.parallel.tensor * config.parallel.context)
        kept.append(output.detach() != 0)

    for part in (engine.model.embedding, *engine.model.blocks.values()):
        part.dropout.register_forward_hook(see)
    for step in steps:
        seed_dropout(config.seed, step, engine.dropout_rank)
        batch = rank_batches(0, engine.data_rank, engine.data_ranks, 2)[0]
        engine.forward_backward([as_tensors(batch)], 1.0)
    return kept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_and_every_step_drops_something_else(layout):
    ranks, flags = LAYOUTS[layout]
    kept = run_ranks(ranks, _kept, flags, (1, 2, 1))
    places = len(kept[0]) // 3
    for masks in kept:
        first, second, again = (masks[start : start + places] for start in range(0, 3 * places, places))
        assert all(torch.equal(mask, repeated) for mask, repeated in zip(first, again, strict=True))
        for mask, other in combinations([*first, *second], 2):
            _assert_independent(mask, other)
    for masks, others in combinations(kept, 2):
        for mask, other in zip(masks, others, strict=True):
            _assert_independent(mask, other)


def _assert_independent(mask, other):
    """Of two fair and independent masks, each keeps half, and they agree in half; within five standard deviations."""
    deviation = 0.5 / mask.numel() ** 0.5
    for share in (mask.float().mean(), other.float().mean(), (mask == other).float().mean()):
        assert abs(share - 0.5) < 5 * deviation


def _attention_weights(world, flags, seed):
    """Weights [B, A, S/n, S] that a first block's attention gives to each token, all of them alike before dropout."""
    config = run_config("gpt", world.size, [*flags, "--model.dropout", "0.2", "--train.seq-len", "64"])
    engine = Engine(config, world)
    seed_dropout(seed, 1, engine.dropout_rank)
    seq, ranks, rank = 64, config.parallel.context, engine.mesh.rank("context")
    share = slice(rank * seq // ranks, (rank + 1) * seq // ranks)
    nothing = torch.zeros(2, 4, seq // ranks, seq)
    return engine.model.blocks["0"].attention.core(nothing, nothing, torch.eye(seq)[share].expand_as(nothing))


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, ULYSSES), (4, [*ULYSSES[:1], "4", *ULYSSES[2:]])])
def test_attention_drops_weights_of_all_heads_alike_under_ulysses(ranks, flags):
    weights = torch.cat(run_ranks(ranks, _attention_weights, flags, 7), dim=2)  # [B, A, S, S]
    past = torch.ones(64, 64).tril().bool()
    expected = 1 / torch.arange(1, 65)[:, None] / 0.8
    assert not weights[:, :, ~past].any()
    kept = weights != 0
    assert torch.equal(kept & past, kept)
    torch.testing.assert_close(weights[kept], expected.expand_as(weights)[kept])
    pairs = past.sum().item()
    shares = kept[:, :, past].float().mean(-1)
    assert ((shares - 0.8).abs() < 5 * (0.8 * 0.2 / pairs) ** 0.5).all()
    for one, other in combinations(kept.flatten(0, 1)[:, past], 2):
        agreement = (one == other).float().mean()
        assert abs(agreement - (0.8**2 + 0.2**2)) < 5 * (0.68 * 0.32 / pairs) ** 0.5


def _train_and_save(world, flags, folder, steps, resume):
    """Losses of steps with dropout, from a checkpoint on if there is one."""
    config = run_config("gpt", world.size, [*flags, *HALF])
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    checkpoints = Checkpoints(folder, keep_last=9, world=world)
    if resume:
        checkpoints.load(steps[0] - 1, engine.model, optimizer)
    losses = []
    for step in steps:
        seed_dropout(config.seed, step, engine.dropout_rank)
        batches = rank_batches(step, engine.data_rank, engine.data_ranks, 2)
        losses.append(train_step(engine, optimizer, batches, clip=1.0).loss)
    checkpoints.save(steps[-1], engine.model, optimizer, {})
    return losses


@pytest.mark.parametrize("layout", ["tensor 2", "ulysses 2", "ulysses 2 x zero 3 x2"])
def test_a_resumed_run_drops_what_the_straight_one_does(layout, tmp_path):
    ranks, flags = LAYOUTS[layout]
    straight = run_ranks(ranks, _train_and_save, flags, tmp_path / "straight", range(1, 5), False)
    run_ranks(ranks, _train_and_save, flags, tmp_path / "resumed", range(1, 3), False)
    resumed = run_ranks(ranks, _train_and_save, flags, tmp_path / "resumed", range(3, 5), True)
    assert resumed == [losses[2:] for losses in straight]
