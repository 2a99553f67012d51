"""What is summed over ranks counts once: trained tokens, and each parameter."""

import numpy as np
import pytest
import torch

from polarlm.config import load_run
from polarlm.data import Batch
from polarlm.model import IGNORED
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from ranks import run_ranks

SEQ, VOCAB = 16, 61
TENSOR, RING = ["--parallel.tensor", "2"], ["--parallel.context", "2"]
ULYSSES = [*RING, "--parallel.context-method", "ulysses"]
HYBRID = ["--parallel.context", "4", "--parallel.context-method", "hybrid", "--parallel.context-ulysses", "2"]


def _config(ranks, *flags):
    words = f"--model.family llama --model.layers 2 --model.hidden 32 --model.heads 4 --model.vocab-size {VOCAB}"
    words += f" --train.steps 3 --train.seq-len {SEQ} --parallel.ranks {ranks}"
    return load_run(None, environment={}, flags=[*words.split(), *flags]).config


def _batch(targets, seed=1):
    """Random tokens, and these targets [B, S] of which some are not trained."""
    tokens = np.random.default_rng(seed).integers(VOCAB, size=targets.shape)
    positions = np.broadcast_to(np.arange(targets.shape[1]), targets.shape)
    return Batch(tokens, targets, positions.copy(), None)


def _targets(trained):
    """int64 [B, S]: targets where `trained` says so."""
    return np.where(trained, np.random.default_rng(2).integers(VOCAB, size=np.shape(trained)), IGNORED)


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _step(world, flags, microbatches):
    """Loss, norm and gradients of a step on this rank's microbatches."""
    engine = Engine(_config(world.size, *flags), world)
    optimizer, gradients = build_optimizer(engine.model, _config(world.size).train.optimizer), {}

    def keep(*_):
        gradients.update({name: _whole(parameter.grad) for name, parameter in engine.model.named_parameters()})

    optimizer.register_step_pre_hook(keep)
    share = len(microbatches) // engine.data_ranks
    own = microbatches[engine.data_rank * share : (engine.data_rank + 1) * share]
    result = train_step(engine, optimizer, own, clip=0.0)
    return result.loss, result.grad_norm, gradients


def _assert_same(actual, expected):
    loss, norm, gradients = expected
    assert actual[:2] == pytest.approx((loss, norm), rel=1e-5)
    for name, gradient in gradients.items():
        assert (actual[2][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * norm, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tokens_loss_counts_the_same_beside_many_and_few(ranks):
    """B20: 10 tokens at loss 1 and 100 at 3 are 2.8182 in the mean, not 2."""

    def step(world):
        engine = Engine(_config(world.size, "--train.seq-len", "100"), world)
        weight = engine.model.norm.weight

        def loss(batch):
            trained = int((batch[-1] != IGNORED).sum())
            zero = 0 * (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).sum()
            return trained * (1.0 if trained == 10 else 3.0) + zero

        engine.loss = loss
        few, many = (_batch(_targets(np.arange(100)[None] < trained)) for trained in (10, 100))
        own = [few, many] if world.size == 1 else [(few, many)[world.rank]]
        return train_step(engine, build_optimizer(engine.model, _config(1).train.optimizer), own, clip=0.0).loss

    assert run_ranks(ranks, step) == [pytest.approx(310 / 110)] * ranks


def test_a_batch_cut_in_any_way_has_the_same_gradients():
    """B20: two samples of 2 and 15 trained tokens at once, one after the other, and on two ranks."""
    targets = _targets(np.arange(SEQ)[None] < np.array([[2], [15]]))
    both = _batch(targets)
    apart = [Batch(both.tokens[i : i + 1], targets[i : i + 1], both.positions[i : i + 1], None) for i in range(2)]
    [expected] = run_ranks(1, _step, [], [both])
    _assert_same(run_ranks(1, _step, [], apart)[0], expected)
    for result in run_ranks(2, _step, [], apart):
        _assert_same(result, expected)


@pytest.mark.parametrize(
    "flags", [RING, ULYSSES, ["--parallel.context", "4"], [*ULYSSES[:1], "4", *ULYSSES[2:]], HYBRID]
)
def test_sequence_shards_divide_by_the_whole_sequences_tokens(flags):
    """B21: some tokens trained, and one a sequence, of which all ranks but one have none."""
    some, one = np.random.default_rng(3).random((2, SEQ)) < 0.4, np.arange(SEQ)[None].repeat(2, 0) == 13

    def steps(world, *flags):
        return [_step(world, flags, [_batch(_targets(trained))]) for trained in (some, one)]

    [expected] = run_ranks(1, steps)
    for results in run_ranks(int(flags[1]), steps, *flags):
        for result, alone in zip(results, expected, strict=True):
            _assert_same(result, alone)


@pytest.mark.parametrize(("ranks", "flags"), [(2, TENSOR), (4, [*TENSOR, "--parallel.zero-stage", "3"])])
def test_a_repeated_parameter_counts_once_in_the_norm(ranks, flags):
    """B22: a shared part of 9 and a repeated part of 16 make 5; counted by every rank it would be more."""

    def norm(world):
        engine = Engine(_config(world.size, *flags), world)
        for name, parameter in engine.model.named_parameters():
            square = {"blocks.0.attention.q.weight": 9.0, "blocks.0.attention_norm.weight": 16.0}.get(name, 0.0)
            parameter.grad = torch.ones_like(parameter) * (square / parameter.numel()) ** 0.5
        return engine.clip_gradients(0.0)

    assert run_ranks(ranks, norm) == [pytest.approx(5.0)] * ranks


def test_two_models_in_one_process_do_not_disturb_each_other():
    """B27: head counts are each model's own."""

    def losses(world):
        heads = [[], ["--model.heads", "8", "--model.kv-heads", "2"]]
        engines = [Engine(_config(world.size, *more, *(ULYSSES if world.size > 1 else [])), world) for more in heads]
        return [engine.sum(engine.evaluate(_tensors(engine)))[0] for engine in (*engines, *engines)]

    [expected] = run_ranks(1, losses)
    assert expected[0] != expected[1]
    for found in run_ranks(2, losses):
        assert found == pytest.approx(expected, rel=1e-5)


def _tensors(engine):
    batch = _batch(_targets(np.ones((2, SEQ), bool)))
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), None, torch.from_numpy(batch.targets)
