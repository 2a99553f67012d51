"""The loss of each dataset of a blend, in the metrics of a run that asks for it."""

import json

import numpy as np
import pytest
import torch

from polarlm.config import DataConfig, dump_run, load_run
from polarlm.data import IndexedWriter, load_tokenizer, open_split
from polarlm.parallel import Device, World
from polarlm.train import Validation, fit, open_run

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


def test_a_run_that_does_not_ask_has_one_loss(folder):
    fit(_open(folder))
    assert "val_loss_of_source" not in (folder / "metrics.jsonl").read_text()
