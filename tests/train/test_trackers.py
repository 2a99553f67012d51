"""Trackers hear every step, and none can end a run."""

import csv

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polarlm.config import load_run
from polarlm.train import trackers
from polarlm.train.metrics import MetricsLog
from polarlm.train.trackers import Trackers


def _write(folder, names, steps=3, config=None):
    log = MetricsLog(folder / "metrics.jsonl", 0, Trackers(names, folder, config))
    for step in range(1, steps + 1):
        log.write({"step": step, "loss": 1 / step} | ({"val_loss": 9.0} if step == 2 else {}))
    log.close()
    return (folder / "metrics.jsonl").read_text().count("\n")


def test_csv(tmp_path):
    assert _write(tmp_path, ["csv"]) == 3
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["loss"] for row in rows] == ["1.0", "0.5", "0.3333333333333333"]
    assert [row["val_loss"] for row in rows] == ["", "9.0", ""]


class _Broken:
    def __init__(self, folder, config):
        self.heard = 0

    def log(self, step, metrics):
        raise ConnectionError("no network")

    def close(self):
        raise AssertionError("is not asked again")


@pytest.mark.parametrize(
    ("start", "words"),
    [(_Broken, "from here on"), (lambda *_: 1 / 0, "did not start"), (lambda *_: __import__("no_such"), "pip install")],
)
def test_one_that_fails_is_told_of_and_the_others_go_on(tmp_path, monkeypatch, caplog, start, words):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", start)
    assert _write(tmp_path, ["wandb", "csv"]) == 3
    assert words in caplog.text
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4


def test_a_resumed_run_goes_on_in_the_same_table(tmp_path):
    _write(tmp_path, ["csv"])
    log = MetricsLog(tmp_path / "metrics.jsonl", 3, Trackers(["csv"], tmp_path, None))
    log.write({"step": 4, "loss": 0.25})
    log.close()
    assert [row["step"] for row in csv.DictReader((tmp_path / "metrics.csv").open())] == ["1", "2", "3", "4"]


def test_steps_that_a_resume_repeats_stand_once_and_new_numbers_get_a_column(tmp_path):
    _write(tmp_path, ["csv"])
    log = MetricsLog(tmp_path / "metrics.jsonl", 2, Trackers(["csv"], tmp_path, None))
    log.write({"step": 3, "loss": 7.0, "val_loss_of_source": {"a": 1.5}})
    log.close()
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [row["loss"] for row in rows] == ["1.0", "0.5", "7.0"]
    assert [row["val_loss_of_source/a"] for row in rows] == ["", "", "1.5"]


def test_tensorboard_reads_what_it_was_told(tmp_path):
    _write(tmp_path, ["tensorboard"])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert [e.step for e in events.Scalars("val_loss")] == [2]


def test_wandb_keeps_the_run_in_its_folder_without_a_network(tmp_path):
    flags = "--model GPT125M --model.vocab-size 257 --train.steps 1 --train.seq-len 8".split()
    config = load_run(None, environment={"WANDB_MODE": ""}, flags=flags).config
    assert _write(tmp_path, ["wandb"], config=config) == 3
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
