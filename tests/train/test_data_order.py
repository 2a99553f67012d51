"""Every sample is trained on exactly once an epoch, in one order, wherever a run stops and on however many ranks it
goes on."""

import shutil
from itertools import chain

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polarlm.config import load_run
from polarlm.data import IndexedWriter
from polarlm.parallel import Device, World
from polarlm.train import fit, loop, open_run
from ranks import run_ranks
from train.trained import make_folder

ALONE = World(0, 1, Device(torch.device("cpu")))
SEQ = 8
SHAPE = (
    f"--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --train.seq-len {SEQ} "
    "--data.tokenizer bytes --data.split 1 0 0 "
    "--train.optimizer.lr 1e-2 --checkpoint.keep-last 99 --checkpoint.in-background false"
)


class Killed(Exception):
    """The run's end, in the middle of a step."""


@pytest.fixture
def start(tmp_path):
    """Opens a run's folder on so many ranks, each with data of its own number of samples; its ids tell them apart."""

    def start(name, samples, ranks, *flags):
        folder = tmp_path / name
        data = tmp_path / f"{samples}"
        if not data.with_suffix(".idx").exists():
            with IndexedWriter(data, np.uint16) as writer:
                writer.add_document(np.arange(samples * SEQ))
        words = [*SHAPE.split(), "--data.paths", str(data), "--parallel.ranks", str(ranks), *flags]
        config = load_run(None, environment={}, flags=words).config
        make_folder(folder, config)
        return folder, config

    return start


def _train(world, folder, config, killed_in=None):
    """Go on with a run to its end, or until it is killed in a step; what this rank trained on, [step][sample], by the
    first step's number."""
    run = open_run(folder, config, world)
    first, trained, take = run.progress.step + 1, [], loop.train_step

    def take_and_tell(engine, optimizer, microbatches, **options):
        trained.append([int(row[0]) // SEQ for batch in microbatches for row in batch.tokens])
        if first + len(trained) - 1 == killed_in:
            raise Killed
        return take(engine, optimizer, microbatches, **options)

    loop.train_step = take_and_tell
    try:
        fit(run)
    except Killed:
        trained.pop()  # it was not taken
    finally:
        loop.train_step = take
    return first, trained


def _global_batches(shares):
    """The samples of each step over all ranks, by step."""
    ((first, _), *_) = shares
    steps = zip(*(trained for _, trained in shares), strict=True)
    return {first + number: [*chain(*step)] for number, step in enumerate(steps)}


def _weights(folder, step):
    (shard,) = (folder / f"checkpoints/step-{step}/weights").glob("*.safetensors")
    return load_file(shard)


def test_from_four_ranks_to_two_to_three_the_order_is_the_straight_runs(start):
    """B31: batches of 12 of the 30 samples of an epoch, so that epochs end within a batch; 2 steps are done twice."""
    flags = "--train.global-batch-size 12 --train.steps 20 --checkpoint.every 4".split()
    straight = _global_batches(run_ranks(1, _train, *start("straight", 30, 1, *flags)))
    moved, lost = {}, []
    for ranks, killed_in in ((4, 7), (2, 14), (3, None)):
        shares = run_ranks(ranks, _train, *start("moved", 30, ranks, *flags), killed_in)
        batches = _global_batches(shares)
        lost.append(len(moved.keys() & batches.keys()))
        assert all(moved[step] == batches[step] for step in moved.keys() & batches.keys())
        moved |= batches
    assert lost == [0, 2, 1]
    assert moved == straight
    assert [*moved] == [*range(1, 21)]
    order = [*chain(*moved.values())]
    epochs = [tuple(order[begin : begin + 30]) for begin in range(0, len(order), 30)]
    assert len(epochs) == 8
    assert all(sorted(epoch) == [*range(30)] for epoch in epochs)
    assert len(set(epochs)) == 8


def test_two_resumes_in_a_row_with_other_microbatches(start):
    """B32: saved after 5 steps on two ranks, after 8 on three, and gone on with on one."""
    flags = "--train.global-batch-size 6 --train.steps 10".split()
    straight = _global_batches(run_ranks(1, _train, *start("straight", 10, 1, *flags)))
    moved = {}
    for ranks, micro, killed_in, every in ((2, 3, 6, 5), (3, 1, 9, 4), (1, 2, None, 10)):
        own = f"--train.micro-batch-size {micro} --checkpoint.every {every}".split()
        batches = _global_batches(run_ranks(ranks, _train, *start("moved", 10, ranks, *flags, *own), killed_in))
        assert not moved.keys() & batches.keys()
        moved |= batches
    assert moved == straight


def test_a_run_stopped_after_any_step_of_three_epochs_goes_on_as_the_straight_one(start):
    """B31 and invariant 2: ten samples in batches of two: 15 steps, the 5th and the 10th at an epoch's end."""
    flags = "--train.global-batch-size 2 --train.steps 15 --checkpoint.every".split()
    folder, config = start("straight", 10, 1, *flags, "1")
    first, straight = _train(ALONE, folder, config)
    assert first == 1
    for epoch in range(3):
        assert sorted(chain(*straight[5 * epoch : 5 * epoch + 5])) == [*range(10)]
    for done in range(1, 15):
        resumed, config = start(f"after {done}", 10, 1, *flags, "0")
        shutil.copytree(folder / f"checkpoints/step-{done}", resumed / f"checkpoints/step-{done}")
        first, rest = _train(ALONE, resumed, config)
        assert first == done + 1
        assert rest == straight[done:]
        weights, expected = _weights(resumed, 15), _weights(folder, 15)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected), done
