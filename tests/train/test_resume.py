"""A run that is killed and continued on other ranks ends as if nothing had happened; tests/faults has what else may
befall it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

from polarlm.config import load_run_folder
from polarlm.data import load_tokenizer
from polarlm.train import fit, open_run
from ranks import run_ranks

STEPS = 60
RUN = f"""\
name: run
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2}}
data: {{paths: [text]}}
train:
  steps: {STEPS}
  seq_len: 32
  micro_batch_size: 2
  global_batch_size: 8
  optimizer: {{lr: 3e-3}}
  schedule: {{warmup_steps: 5}}
  eval_every: 20
  eval_samples: 5
checkpoint: {{every: 7, keep_last: 2}}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small prepared dataset, shared by the runs."""
    folder = tmp_path_factory.mktemp("data")
    documents = [json.dumps({"text": f"{n} squared is {n * n}. " * 5}) for n in range(200)]
    (folder / "squares.jsonl").write_text("\n".join(documents))
    _polarlm(folder, "data", "prepare", "squares.jsonl", "--tokenizer", "bytes", "--output", "text").check_returncode()
    return folder / "text"


def _polarlm(folder, *words, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "polarlm", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def folder(tmp_path, text):
    def folder(name):
        path = tmp_path / name
        path.mkdir()
        (path / "run.yaml").write_text(RUN.replace("[text]", f"[{text}]"))
        return path

    return folder


def _train(folder, *words):
    result = _polarlm(folder, "train", "run.yaml", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _train_straight(folder, ranks):
    """The same run from its beginning to its end, in ranks forked from the test: it needs no launcher, and no start."""
    resolved = _polarlm(folder, "train", "run.yaml", "--parallel.ranks", str(ranks), "--show-config").stdout
    run = folder / "runs" / "run"
    load_tokenizer("bytes").save(run / "tokenizer")
    (run / "config.yaml").write_text(resolved)
    run_ranks(ranks, lambda world: fit(open_run(run, load_run_folder(run), world)))


def _result(folder):
    """Everything that must not depend on interruptions: losses, rates, validation, final weights."""
    run = folder / "runs" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "samples", "tokens", "loss", "grad_norm", "lr", "val_loss", "val_bits_per_byte")
    metrics = [[line.get(key) for key in kept] for line in lines]
    weights = {}
    for shard in sorted((run / "checkpoints" / f"step-{STEPS}" / "weights").glob("*.safetensors")):
        weights |= load_file(shard)
    return metrics, weights


def _start_and_kill(folder, step, *words):
    """Start training, and kill the launcher and its ranks without warning once `step` is in the metrics."""
    command = [sys.executable, "-m", "polarlm", "train", "run.yaml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        _wait_for_step(folder, step, process)
        process.send_signal(signal.SIGKILL)
    _wait_until_no_rank_is_left(folder)


def _wait_for_step(folder, step, process):
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if lines and f'"step": {step},' in lines[-1]:
            return
        if len(lines) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"training ended with {process.poll()} before step {step}")


def _wait_until_no_rank_is_left(folder):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not _ranks_of(folder):
            return
        time.sleep(0.05)
    raise AssertionError(f"ranks left: {_ranks_of(folder)}")


def _ranks_of(folder):
    left = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdecimal() and os.readlink(f"/proc/{entry}/cwd") == str(folder):
                left.append(entry)
        except OSError:
            continue
    return left


def test_from_two_ranks_to_one_and_back(folder):
    straight, moved = folder("straight"), folder("moved")
    _train_straight(straight, 2)
    _start_and_kill(moved, 20, "--parallel.ranks", "2")
    _start_and_kill(moved, 40, "--parallel.ranks", "1", "--resume")
    _train(moved, "--parallel.ranks", "2", "--train.micro-batch-size", "1", "--resume")
    (metrics, weights), (moved_metrics, moved_weights) = _result(straight), _result(moved)
    for line, moved_line in zip(metrics, moved_metrics, strict=True):
        for value, moved_value in zip(line, moved_line, strict=True):
            assert moved_value == (None if value is None else pytest.approx(value, rel=1e-5)), line[0]
    for name, weight in weights.items():
        assert (moved_weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def test_a_reader_that_goes_away_ends_no_run(folder):
    place = folder("run")
    command = [sys.executable, "-m", "polarlm", "train", "run.yaml", "--train.eval-every", "5", "--train.steps", "40"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert (place / "runs/run/checkpoints/step-40/complete.json").exists()


def test_a_new_run_of_a_taken_name_says_what_it_is_called(folder):
    place = folder("run")
    (place / "runs/run").mkdir(parents=True)
    words = ("--train.steps", "1", "--train.eval-every", "0", "--train.schedule.warmup-steps", "0")
    result = _polarlm(place, "train", "run.yaml", *words)
    assert result.returncode == 0
    assert "note: runs/run is there already, so this new run is runs/run-2" in result.stderr
