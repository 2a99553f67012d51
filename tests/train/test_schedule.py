"""The learning rate of every step, by hand."""

import math

import pytest

from polarlm.config import TrainConfig, load_run
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


def test_linear_falls_in_a_line():
    train = _train("linear")
    assert learning_rate(12, train) == pytest.approx(0.55)
    assert learning_rate(20, train) == pytest.approx(0.1)


def test_wsd_stays_at_the_peak_and_falls_in_its_last_steps():
    train = TrainConfig(steps=20, optimizer={"lr": 1.0}, schedule={"name": "wsd", "warmup_steps": 4, "decay_steps": 8})
    assert {learning_rate(step, train) for step in range(4, 13)} == {1.0}
    assert learning_rate(16, train) == pytest.approx(0.5)
    assert learning_rate(20, train) == 0.0


def test_inverse_square_root_is_vaswanis():
    train = TrainConfig(steps=100, optimizer={"lr": 1.0}, schedule={"name": "inverse_sqrt", "warmup_steps": 4})
    assert [learning_rate(step, train) for step in (4, 16, 64)] == [1.0, 0.5, 0.25]


def test_a_warmup_in_tokens_is_as_many_steps(tmp_path):
    flags = ["--model", "GPT125M", "--train.steps", "50", "--train.seq-len", "8", "--train.global-batch-size", "10"]
    warm = [*flags, "--train.schedule.warmup-tokens", "800"]
    train = load_run(None, environment={}, flags=warm).config.train
    assert train.schedule.warmup_steps == 10
    assert learning_rate(10, train) == train.optimizer.lr


def test_without_warmup_the_first_step_is_near_the_peak():
    train = TrainConfig(steps=1000, optimizer={"lr": 1.0})
    assert learning_rate(1, train) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_changes_no_rate(accumulation):
    rates = [learning_rate(step, _train("cosine")) for step in range(1, 21)]
    other = _train("cosine", gradient_accumulation_steps=accumulation, micro_batch_size=8 // accumulation)
    assert [learning_rate(step, other) for step in range(1, 21)] == rates
