"""The loss of each dataset of a blend, in the metrics of a run that asks for it."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from polarlm.config import DataConfig, dump_run, load_run
from polarlm.data import Batch, IndexedWriter, load_tokenizer, open_split
from polarlm.model import IGNORED, Transformer
from polarlm.parallel import Device, Engine, World
from polarlm.parallel.build import initialise
from polarlm.train import SourceLosses, Validation, build_optimizer, fit, open_run, train_step
from ranks import run_ranks

ALONE = World(0, 1, Device(torch.device("cpu")))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder beside two datasets: one letter over and over, and any letters."""
    monkeypatch.chdir(tmp_path)
    letters = {"easy": np.full(900, 97), "hard": np.random.default_rng(1).integers(97, 123, 900)}
    for name, ids in letters.items():
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for document in np.split(ids, 10):
                writer.add_document(document)
    folder = tmp_path / "run"
    folder.mkdir()
    load_tokenizer("bytes").save(folder / "tokenizer")
    return folder


def _open(folder, *flags):
    words = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --train.seq-len 16 "
    words += "--train.steps 20 --train.eval-every 20 --train.eval-samples 12 --train.micro-batch-size 4 "
    words += "--train.optimizer.lr 1e-2 --data.tokenizer bytes --data.split 8 2 0"
    flags = [*words.split(), "--data.paths", "0.25 easy", "0.75 hard", *flags]
    config = load_run(None, environment={}, flags=flags).config
    (folder / "config.yaml").write_text(dump_run(config))
    return open_run(folder, config, ALONE)


def test_each_source_has_the_loss_it_has_alone(folder):
    run = _open(folder, "--log.per-source")
    fit(run)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    losses = last["val_loss_of_source"]
    assert losses.keys() == {"easy", "hard"}
    assert losses["easy"] < losses["hard"] - 0.1
    for name, samples in (("easy", 3), ("hard", 9)):
        alone = open_split(DataConfig(paths=[name], split=[8, 2, 0]), 16, 1, "validation")
        assert losses[name] == pytest.approx(Validation(alone, samples, None, False).run(run.engine, 4).loss, rel=1e-6)
    assert last["val_loss"] == pytest.approx(0.25 * losses["easy"] + 0.75 * losses["hard"], rel=1e-6)


def test_training_tells_the_loss_of_each_source_and_is_the_same_training(folder):
    fit(_open(folder, "--log.per-source"))
    asked = _metrics(folder)
    for line in asked:  # each global batch has one sample of the one and three of the other
        losses = line["loss_of_source"]
        assert line["loss"] == pytest.approx(0.25 * losses["easy"] + 0.75 * losses["hard"], rel=1e-6)
    assert asked[-1]["loss_of_source"]["easy"] < asked[-1]["loss_of_source"]["hard"] - 0.1
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    fit(_open(folder))
    plain = _metrics(folder)
    assert "loss_of_source" not in plain[0]
    assert "val_loss_of_source" not in plain[-1]
    same = ("loss", "grad_norm")
    assert [[line[name] for name in same] for line in plain] == [[line[name] for name in same] for line in asked]


def _metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SOURCES = [0, 1, 1, 3, 0, 3, 1, 3]  # of the samples of a global batch; a third dataset has none in it
LAYOUTS = {
    "alone": (1, ""),
    "data 2": (2, ""),
    "tensor 2": (2, "--parallel.tensor 2"),
    "ring 2": (2, "--parallel.context 2"),
    "ulysses 2": (2, "--parallel.context 2 --parallel.context-method ulysses"),
    "ring 2 x tensor 2": (4, "--parallel.context 2 --parallel.tensor 2"),
    "pipeline 2": (2, "--parallel.pipeline 2"),
    "zbv pipeline 2": (2, "--parallel.pipeline 2 --parallel.pipeline-schedule zbvzerobubble --model.layers 4"),
    "zero 3 x2 x tensor 2": (4, "--parallel.zero-stage 3 --parallel.tensor 2"),
}


def _layout_config(ranks, flags):
    words = "--model.family llama --model.layers 2 --model.hidden 32 --model.heads 4 --model.vocab-size 61 "
    words += f"--train.steps 1 --train.seq-len 16 --train.micro-batch-size 2 --parallel.ranks {ranks} {flags}"
    return load_run(None, environment={}, flags=words.split()).config


def _global_batch():
    """Samples with very different numbers of trained tokens, so that a mean of means would be wrong."""
    drawn = np.random.default_rng(5)
    tokens, targets = drawn.integers(61, size=(2, len(SOURCES), 16))
    for row, targets_of_row in enumerate(targets):
        targets_of_row[: 2 * row] = IGNORED
    return tokens, targets


def _step(world, config):
    engine = Engine(config, world)
    tokens, targets = _global_batch()
    share = len(SOURCES) // engine.data_ranks
    first = engine.data_rank * share
    rows = [slice(start, start + 2) for start in range(first, first + share, 2)]
    positions = np.broadcast_to(np.arange(16), (2, 16)).copy()
    batches = [Batch(tokens[two], targets[two], positions, None, np.array(SOURCES)[two]) for two in rows]
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    return train_step(engine, optimizer, batches, clip=0, sources=SourceLosses(engine, list("abcd"))).loss_of_source


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_tells_the_loss_that_each_source_has_alone(layout):
    ranks, flags = LAYOUTS[layout]
    config = _layout_config(ranks, flags)
    model = Transformer(config.model)
    initialise(model, config)
    tokens, targets = (torch.from_numpy(array) for array in _global_batch())
    logits = model.double()(tokens, torch.arange(16)[None]).detach()
    alone = {}
    for source in set(SOURCES):
        rows = torch.tensor(SOURCES) == source
        mean = F.cross_entropy(logits[rows].flatten(0, 1), targets[rows].flatten(), ignore_index=IGNORED)
        alone["abcd"[source]] = pytest.approx(mean.item(), rel=1e-5)
    for told in run_ranks(ranks, _step, config):
        assert told == alone
