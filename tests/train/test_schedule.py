"""The learning rate of every step, by hand."""

import math

import pytest

from polarlm.config import TrainConfig
from polarlm.train import learning_rate


def _train(name, **more):
    schedule = {"name": name, "warmup_steps": 4, "min_lr": 0.1}
    return TrainConfig(steps=20, optimizer={"lr": 1.0}, schedule=schedule, **more)


def test_warmup_reaches_the_peak_at_its_last_step():
    assert [learning_rate(step, _train("cosine")) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_is_halfway_in_the_middle_and_minimal_at_the_end():
    train = _train("cosine")
    assert learning_rate(12, train) == pytest.approx(0.55)
    assert learning_rate(20, train) == pytest.approx(0.1)
    assert learning_rate(8, train) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_constant_stays_at_the_peak():
    assert {learning_rate(step, _train("constant")) for step in range(4, 21)} == {1.0}


def test_without_warmup_the_first_step_is_near_the_peak():
    train = TrainConfig(steps=1000, optimizer={"lr": 1.0})
    assert learning_rate(1, train) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_changes_no_rate(accumulation):
    rates = [learning_rate(step, _train("cosine")) for step in range(1, 21)]
    other = _train("cosine", gradient_accumulation_steps=accumulation, micro_batch_size=8 // accumulation)
    assert [learning_rate(step, other) for step in range(1, 21)] == rates
