"""Every schedule, alone and with the other axes, against the plain loop."""

import functools

import pytest
import torch

from parallel.reference import assert_same_run, plain_steps, rank_batches, run_config, train, whole
from polarlm.parallel import Engine
from polarlm.train.step import as_tensors
from ranks import run_ranks

LAYERS = ["--model.layers", "4"]
SCHEDULES = "gpipe 1f1b interleaved1f1b loopedbfs interleavedzerobubble zbvzerobubble dualpipev".split()
RING, ULYSSES = "--parallel.context 2", "--parallel.context 2 --parallel.context-method ulysses"
TENSOR, ZERO = "--parallel.tensor 2", "--parallel.zero-stage"


def _flags(schedule, micro, accumulation, more="", ranks=2):
    pipeline = f"--parallel.pipeline {ranks} --parallel.pipeline-schedule {schedule}"
    batch = f"--train.micro-batch-size {micro} --train.gradient-accumulation-steps {accumulation}"
    return [*LAYERS, *f"{pipeline} {batch} {more}".split()]


@functools.cache
def _expected(family, packed=False):
    return plain_steps(family, 0.1, packed, LAYERS)


def _check(family, ranks, flags, micro, packed=False):
    assert_same_run(run_ranks(ranks, train, family, flags, micro, 0.1, packed), _expected(family, packed))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("family", "packed"), [("gpt", False), ("llama", True)])
def test_every_schedule_takes_the_same_steps(schedule, family, packed):
    _check(family, 2, _flags(schedule, 2, 4), 2, packed)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_schedule_over_every_zero_stage(schedule, stage):
    _check("llama tied", 4, _flags(schedule, 1, 4, f"{ZERO} {stage}"), 1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbvzerobubble"])
@pytest.mark.parametrize("more", [TENSOR, RING, ULYSSES])
def test_every_kind_of_schedule_over_every_axis(schedule, more):
    _check("llama", 4, _flags(schedule, 2, 4, more), 2, packed=more != TENSOR)


@pytest.mark.parametrize(
    ("schedule", "more", "micro"),
    [
        ("1f1b", f"{TENSOR} {ZERO} 3", 1),
        ("zbvzerobubble", f"{TENSOR} {RING}", 2),
        ("1f1b", f"{TENSOR} {RING} {ZERO} 3", 2),  # parameters shared out over the ring's ranks too
        ("interleaved1f1b", f"{RING} {ZERO} 3", 1),
        ("dualpipev", f"{ULYSSES} {ZERO} 2", 1),
    ],
)
def test_three_axes_and_all_at_once(schedule, more, micro):
    _check("gpt", 8, _flags(schedule, micro, 4, more), micro)


def test_four_stages_and_fewer_microbatches_than_stages():
    _check("gpt", 4, _flags("1f1b", 2, 4, ranks=4), 2)
    _check("gpt", 4, _flags("1f1b", 4, 2, ranks=4), 4)


def test_a_split_by_hand():
    _check("llama", 2, [*_flags("1f1b", 2, 4), "--parallel.pipeline-split", "3", "1"], 2)


def _evaluate(world, flags):
    """Two passes over five batches, the last of them ragged, between training steps."""
    engine = Engine(run_config("gpt", world.size, flags), world)
    batches = [as_tensors(batch) for batch in rank_batches(0, 0, 1, 2)]
    ragged = tuple(None if each is None else each[:1] for each in batches[0])
    losses = []
    for _ in range(2):
        losses.append(engine.sum(sum(engine.evaluate(batch) for batch in [*batches, ragged]))[0])
        engine.forward_backward(batches, 1.0)
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "loopedbfs", "dualpipev"])
def test_evaluation_passes_through_the_stages(schedule):
    [alone] = run_ranks(1, _evaluate, LAYERS)
    for losses in run_ranks(2, _evaluate, _flags(schedule, 2, 4)):
        assert losses == pytest.approx(alone, rel=1e-6)
        assert losses[0] == losses[1]


def _recomputed(world, schedule, mode):
    engine = Engine(run_config("llama", world.size, [*_flags(schedule, 2, 4), "--train.recompute", mode]), world)
    torch.manual_seed(world.rank)
    engine.forward_backward([as_tensors(batch) for batch in rank_batches(0, 0, 1, 2)], 100.0)
    return {name: whole(parameter.grad) for name, parameter in engine.model.named_parameters()}


@pytest.mark.parametrize(("schedule", "mode"), [("1f1b", "selective"), ("1f1b", "full"), ("zbvzerobubble", "full")])
def test_recomputation_under_a_pipeline_changes_nothing(schedule, mode):
    kept = run_ranks(2, _recomputed, schedule, "none")
    for again, before in zip(run_ranks(2, _recomputed, schedule, mode), kept, strict=True):
        assert all(torch.equal(again[name], before[name]) for name in before)
