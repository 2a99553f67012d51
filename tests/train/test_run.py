"""Runs in this process: validation, starting from other weights, bf16, divergence."""

import errno
import json
import math
import sys
import time

import numpy as np
import pytest
import torch

from polarlm.checkpoint import load_model
from polarlm.config import UserError, load_run
from polarlm.parallel import Device, Engine, World
from polarlm.train import Validation, fit, open_run
from polarlm.train.__main__ import main
from polarlm.train.events import EventLog
from polarlm.train.metrics import MetricsLog
from ranks import run_ranks
from train.trained import make_folder

ALONE = World(0, 1, Device(torch.device("cpu")))
SHAPE = ["--model.family", "llama", "--model.layers", "2", "--model.hidden", "32", "--model.heads", "4"]


@pytest.fixture
def start(tmp_path):
    """Make a run's folder as the command line does, and open it."""

    def start(name, *flags):
        words = [*SHAPE, "--train.seq-len", "16", "--model.vocab-size", "257", "--train.micro-batch-size", "4", *flags]
        config = load_run(None, environment={}, flags=[*words, "--data.tokenizer", "bytes"]).config
        folder = tmp_path / name
        make_folder(folder, config)
        return folder, open_run(folder, config, ALONE)

    return start


def _metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_goes_on_says_from_where(start, capsys):
    fit(start("run", "--train.steps", "3")[1])
    assert "goes on" not in capsys.readouterr().out
    fit(start("run", "--train.steps", "4")[1])
    assert capsys.readouterr().out.splitlines()[0] == "goes on after step 3"


def _cut_a_shard(checkpoint):
    shard = next(checkpoint.glob("weights/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])


DAMAGE = {
    "shard cut": _cut_a_shard,
    "mark gone": lambda checkpoint: (checkpoint / "complete.json").unlink(),
    "file empty": lambda checkpoint: (checkpoint / "state.json").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_whole(start, capsys, caplog, damage):
    """B29: saved after 10 and 20, the latter half-written; it is replaced when its step comes again."""
    flags = ("--train.steps", "20", "--checkpoint.every", "10", "--train.schedule.name", "constant")
    folder, run = start("run", *flags)
    fit(run)
    weights = dict(load_model(folder).named_parameters())
    DAMAGE[damage](folder / "checkpoints/step-20")
    assert (folder / "checkpoints/latest").readlink().name == "step-20"
    capsys.readouterr()
    fit(start("run", *flags)[1])
    said = capsys.readouterr().out.splitlines()
    assert "step-20: passed over" in said[0]
    assert "goes on after step 10" in said
    assert any("step-20: passed over" in message for message in caplog.messages)
    assert [line["step"] for line in _metrics(folder)] == [*range(1, 21)]
    again = dict(load_model(folder, 20).named_parameters())
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_every_step_has_its_line_with_all_that_is_promised(start):
    folder, run = start("run", "--train.steps", "3", "--train.global-batch-size", "8", "--train.eval-every", "2")
    fit(run)
    lines = _metrics(folder)
    promised = """step samples tokens loss grad_norm lr step_time_s samples_per_sec tokens_per_sec
        tokens_per_sec_per_device model_tflops_per_device hardware_tflops_per_device mfu peak_memory_bytes""".split()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(key in line for line in lines for key in promised)
    assert ["val_loss" in line for line in lines] == [False, True, True]
    assert [line["tokens"] for line in lines] == [128, 256, 384]
    assert lines[0]["loss"] == pytest.approx(math.log(257), rel=0.02)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["layout"]["ranks"] == 1


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_rates_follow_optimizer_steps_whatever_the_accumulation(start, accumulation):
    """B37: a warm-up of 80 samples is 10 steps of 8, and the tenth is the first at the peak."""
    folder, run = start(
        "run", "--train.steps", "12", "--train.global-batch-size", "8", "--train.optimizer.lr", "1e-3",
        "--train.micro-batch-size", str(8 // accumulation), "--train.schedule.warmup-tokens", str(80 * 16),
    )  # fmt: skip
    fit(run)
    rates = [line["lr"] for line in _metrics(folder)]
    assert rates[:10] == [pytest.approx(1e-4 * step) for step in range(1, 11)]
    assert rates[10:] == [pytest.approx(5e-4), pytest.approx(0)]


def test_a_run_can_start_from_anothers_weights(start):
    first, run = start("first", "--train.steps", "2")
    fit(run)
    _, second = start("second", "--train.steps", "2", "--seed", "7", "--train.init-from", str(first))
    trained = dict(load_model(first).named_parameters())
    assert second.progress.step == 0
    assert all(torch.equal(trained[name], parameter) for name, parameter in second.engine.model.named_parameters())


def test_bf16_follows_fp32_with_fp32_weights(start):
    losses = {}
    for precision in ("fp32", "bf16"):
        folder, run = start(precision, "--train.steps", "3", "--train.precision", precision)
        fit(run)
        losses[precision] = [line["loss"] for line in _metrics(folder)]
        assert {parameter.dtype for parameter in run.engine.model.parameters()} == {torch.float32}
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=5e-3)


def test_a_run_that_diverges_stops_before_it_is_saved(start):
    folder, run = start("run", "--train.steps", "50", "--train.optimizer.lr", "1e38", "--train.optimizer.clip", "0")
    with pytest.raises(UserError, match=r"train\.optimizer\.lr: step \d+ gave loss (nan|inf)"):
        fit(run)
    assert not list((folder / "checkpoints").glob("step-*"))


def test_without_learning_every_validation_is_the_same(start):
    folder, run = start(
        "run", "--train.steps", "6", "--train.eval-every", "2", "--train.eval-samples", "7",
        "--train.optimizer.lr", "1e-30", "--train.optimizer.weight-decay", "0",
    )  # fmt: skip
    fit(run)
    assert len({line["val_loss"] for line in _metrics(folder) if "val_loss" in line}) == 1


class _Ragged:
    """Seven samples of one length, of which less and less is text."""

    seq_len = 16

    def count(self, epochs=1):
        return 7

    def spread(self, count):
        return list(range(count))

    def source_of(self, sample):
        return 0

    def tokens_of(self, sample):
        return np.random.default_rng(sample).integers(60, size=self.seq_len + 1)

    def document_ids(self, sample):
        return np.zeros(self.seq_len, np.int32)


def _validate(world, batch_size):
    words = [*SHAPE, "--model.vocab-size", "61", "--train.steps", "1", "--parallel.ranks", str(world.size)]
    engine = Engine(load_run(None, environment={}, flags=words).config, world)
    token_bytes = np.arange(61, dtype=np.int32) % 5
    return Validation(_Ragged(), None, token_bytes, False).run(engine, batch_size)


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 1), (1, 2), (1, 3), (1, 8), (2, 1), (2, 3), (3, 4)])
def test_validation_does_not_depend_on_batch_size_or_ranks(ranks, batch_size):
    expected = _validate(ALONE, 7)
    assert expected.tokens == 7 * 16
    targets = np.concatenate([_Ragged().tokens_of(sample)[1:] for sample in range(7)])
    bits = expected.loss * expected.tokens / math.log(2) / (targets % 5).sum()
    assert expected.bits_per_byte == pytest.approx(bits)
    for result in run_ranks(ranks, _validate, batch_size):
        assert result.tokens == expected.tokens
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        assert result.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)


def test_a_full_disk_between_saves_is_one_line(start, monkeypatch, capsys):
    folder, _ = start("run", "--train.steps", "2", "--log.trackers", "csv")

    def write(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MetricsLog, "write", write)
    monkeypatch.setattr(EventLog, "write", write)
    monkeypatch.setattr(sys, "argv", ["train", str(folder)])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {folder}: cannot be written (No space left on device); mend that, and go on with --resume"
    )


@pytest.mark.parametrize(
    "spoiled", [b"\0" * 40 + b"\n", b'{"step": 2, "lo\xff\n', b"[3]\n", b"null\n", b'{"step": null}\n']
)
def test_metrics_that_a_crash_spoiled_do_not_keep_a_run_from_going_on(tmp_path, spoiled):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + spoiled + b'{"step": 2}\n{"step": 3}\n')
    MetricsLog(path, 2).close()
    assert [line["step"] for line in _metrics(tmp_path)] == [1, 2]


def test_a_checkpoint_stays_while_what_follows_its_save_reads_it(start):
    """With one kept and a save each step, the next save would delete it meanwhile."""
    flags = ("--train.steps", "4", "--checkpoint.every", "1", "--checkpoint.keep-last", "1")
    looked = []

    def read_slowly(folder, step):
        time.sleep(0.2)  # a save of this model takes a tenth of it
        looked.append((step, (folder / f"checkpoints/step-{step}").is_dir()))

    fit(start("run", *flags)[1], read_slowly)
    assert looked == [(1, True), (2, True), (3, True), (4, True)]
