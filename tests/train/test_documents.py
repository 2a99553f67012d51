"""Training on documents, each padded: padding changes neither loss nor gradient, on any layout."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from polarlm.config import load_run
from polarlm.data import IndexedWriter, StepShapes, batch_of, open_split
from polarlm.model import Transformer, initialise
from polarlm.parallel import Device, Engine, World
from polarlm.train.step import as_tensors
from train.trained import train_in

ALONE = World(0, 1, Device(torch.device("cpu")))
SEQ, BATCH, STEPS = 16, 4, 6
SHAPE = (
    f"--model.layers 2 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --train.seq-len {SEQ} "
    f"--train.global-batch-size {BATCH} --train.micro-batch-size 1 --train.steps {STEPS} --train.optimizer.lr 1e-2 "
    "--data.tokenizer bytes --data.split 1 1 0 --data.samples documents --data.group-by-length true "
    "--train.eval-every 3 --train.eval-samples 5 --train.z-loss 1e-3 --checkpoint.in-background false"
)


@pytest.fixture
def config_of(tmp_path):
    random = np.random.default_rng(1)
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for size in random.integers(1, 40, size=200):
            writer.add_document(random.integers(257, size=size))

    def config_of(*flags):
        words = [*SHAPE.split(), "--data.paths", str(tmp_path / "data"), *flags]
        return load_run(None, environment={}, flags=words).config

    return config_of


def test_padded_documents_give_the_loss_and_gradients_of_each_alone(config_of):
    config = config_of("--train.z-loss", "0", "--train.micro-batch-size", "2")
    samples = open_split(config.data, SEQ, config.seed)
    ids = [3, 0, 7, 5]
    shape = StepShapes(config, samples).of(ids)
    assert shape.tokens < shape.positions
    batches = [as_tensors(batch_of(samples, some, False, shape.seq_len)) for some in (ids[:2], ids[2:])]
    engine = Engine(config, ALONE)
    trained = engine.count_trained(batches)
    loss = engine.forward_backward(batches, trained)

    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    model.double()
    total = 0.0
    for sample in ids:
        row = torch.from_numpy(samples.tokens_of(sample))
        logits = model(row[None, :-1], torch.arange(len(row) - 1)[None])
        total = total + F.cross_entropy(logits[0], row[1:], reduction="sum")
    (total / shape.tokens).backward()
    assert trained == shape.tokens
    assert loss == pytest.approx(total.item(), rel=1e-6)
    for (name, parameter), own in zip(model.named_parameters(), engine.model.parameters(), strict=True):
        assert (own.grad - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-8, name


def _run(folder, config):
    kept = ("step", "samples", "tokens", "seq_len", "padding", "loss", "grad_norm", "val_loss", "val_tokens")
    return [{key: line[key] for key in kept if key in line} for line in train_in(folder, config)]


def test_layouts_take_the_steps_of_one_process_and_a_resumed_run_those_of_a_straight_one(tmp_path, config_of):
    flags = ["--checkpoint.every", "2", "--checkpoint.keep-last", "9"]
    alone = _run(tmp_path / "alone", config_of(*flags))
    assert len({line["seq_len"] for line in alone}) > 2
    tokens = np.diff([0, *(line["tokens"] for line in alone)])
    for count, line in zip(tokens, alone, strict=True):
        assert line["padding"] == pytest.approx(1 - count / (BATCH * line["seq_len"]))

    shutil.copytree(tmp_path / "alone/checkpoints/step-2", tmp_path / "resumed/checkpoints/step-2")
    assert _run(tmp_path / "resumed", config_of(*flags)) == alone[2:]

    for layout in ("--parallel.zero-stage 2", "--parallel.pipeline 2"):
        both = _run(tmp_path / layout.replace(" ", ""), config_of("--parallel.ranks", "2", *layout.split()))
        assert both == [{key: pytest.approx(value, rel=1e-5) for key, value in line.items()} for line in alone]
    # A ring of two pads to a multiple of four, and trains the same.
    ring = _run(tmp_path / "ring", config_of("--parallel.ranks", "2", "--parallel.context", "2"))
    for line, expected in zip(ring, alone, strict=True):
        assert line["seq_len"] == -(-expected["seq_len"] // 4) * 4
        for key in ("tokens", "loss", "grad_norm"):
            assert line[key] == pytest.approx(expected[key], rel=1e-5), key
