"""The validation loss is the mean over tokens, of the same tokens at every pass, however they are batched."""

import json
import math

import numpy as np
import pytest
import torch

from polarlm.config import load_run
from polarlm.data import IndexedWriter
from polarlm.model import IGNORED
from polarlm.parallel import Device, World
from polarlm.train import Validation, fit
from ranks import run_ranks
from train.trained import open_in

ALONE = World(0, 1, Device(torch.device("cpu")))
SHAPE = "--model.family llama --model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257"
TRAIN = "--train.seq-len 8 --data.tokenizer bytes --train.eval-every 2 --data.split 1 1 0"
FROZEN = "--train.optimizer.lr 1e-30 --train.optimizer.weight-decay 0"


@pytest.fixture
def datasets(tmp_path):
    """Two datasets of 14 documents of different lengths, of which the last 7 validate."""
    for name, seed in (("one", 1), ("two", 2)):
        drawn = np.random.default_rng(seed)
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for length in (9, 14, 23, 3, 8, 11, 17, 5, 31, 12, 2, 19, 40, 7):
                writer.add_document(drawn.integers(256, size=length))
    return [str(tmp_path / name) for name in ("one", "two")]


def _run(world, folder, *flags):
    """Train as the command line does; the lines of the metrics that have a validation."""
    config = load_run(None, environment={}, flags=[*f"{SHAPE} {TRAIN} {FROZEN}".split(), *flags]).config
    fit(open_in(world, folder, config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "val_loss" in line]


def test_loss_depends_on_no_batch_rank_or_accumulation(tmp_path, datasets):
    """B40: seven documents of different lengths."""
    data = ["--data.paths", datasets[0], "--data.mask-documents", "true", "--train.steps", "2"]

    def validate(world):
        found = {}
        for batch in (1, 2, 3, 8):
            for accumulation in (1, 4):
                layout = ["--parallel.ranks", world.size, "--train.micro-batch-size", batch]
                layout += ["--train.gradient-accumulation-steps", accumulation]
                case = (world.size, batch, accumulation)
                folder = tmp_path / "-".join(map(str, case))
                (found[case],) = _run(world, folder, *data, *map(str, layout))
        return found

    lines = run_ranks(1, validate)[0] | run_ranks(2, validate)[0]
    assert len(lines) == 16
    samples = (5 + 31 + 12 + 2 + 19 + 40 + 7 - 1) // 8
    expected = lines[1, 1, 1]["val_loss"]
    for case, line in lines.items():
        assert line["val_tokens"] == samples * 8, case
        assert line["val_loss"] == pytest.approx(expected, rel=1e-6), case


class _TwoAndSix:
    """Two samples, of which 2 and 6 tokens are text."""

    seq_len = 6

    def count(self, epochs=1):
        return 2

    def spread(self, count):
        return list(range(count))

    def source_of(self, sample):
        return 0

    def tokens_of(self, sample):
        return np.array([1] * (3, 7)[sample] + [IGNORED] * (4, 0)[sample])


class _FourOrTwoNats:
    """An engine that finds 4 nats a token where 2 are text, and 2 where more are."""

    data_rank, data_ranks = 0, 1

    def evaluate(self, arrays):
        trained = (arrays[-1] != IGNORED).sum(1)
        return float((trained * torch.where(trained == 2, 4.0, 2.0)).sum())

    def sum(self, *values):
        return list(values)

    sum_over_samples = sum


@pytest.mark.parametrize("batch_size", [1, 2])
def test_loss_is_the_mean_over_tokens_not_over_batches(batch_size):
    """B40: 2 tokens at 4.0 and 6 at 2.0 are 2.5 in the mean, not 3."""
    result = Validation(_TwoAndSix(), None, None, False).run(_FourOrTwoNats(), batch_size)
    assert (result.loss, result.tokens) == (2.5, 8)


@pytest.mark.parametrize("sets", [1, 2])
def test_every_pass_scores_the_same_text_after_a_resume_too(tmp_path, datasets, sets):
    """B42."""
    data = ["--data.paths", *datasets[:sets], "--log.per-source", "true", "--train.eval-samples", "9"]
    for steps in ("4", "6"):
        lines = _run(ALONE, tmp_path / "run", *data, "--train.steps", steps)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert len({line["val_loss"] for line in lines}) == 1
    assert all(line["val_loss_of_source"].keys() == set(datasets[:sets]) for line in lines)
    assert all(line["val_loss_of_source"] == lines[0]["val_loss_of_source"] for line in lines)
    assert lines[0]["val_loss"] == pytest.approx(math.log(257), rel=0.05)
