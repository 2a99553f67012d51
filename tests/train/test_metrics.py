"""`metrics.jsonl` after a resume and after a kill, and the rates in it."""

import json

import pytest
import torch

from polarlm.config import load_run
from polarlm.parallel import Device
from polarlm.train.metrics import MetricsLog
from polarlm.train.speed import Speedometer


def test_a_resume_cuts_later_steps_and_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, after_step=0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float(step)})
    log.close()
    path.write_text(path.read_text() + '{"step": 4, "lo')
    log = MetricsLog(path, after_step=2)
    log.write({"step": 3, "loss": 30.0})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0, 2.0, 30.0]


def test_what_is_no_number_is_null(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", after_step=0)
    log.write({"step": 1, "loss": float("nan"), "val_bits_per_byte": float("inf")})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "val_bits_per_byte": None}


@pytest.mark.parametrize(
    ("flags", "repeated"),
    [
        ("", 0),
        ("--train.recompute selective", 16_777_216),
        ("--train.recompute full", 117_440_512),
        ("--train.recompute full --train.recompute-every 2", 58_720_256),
    ],
)
def test_hardware_flops_count_what_is_recomputed_and_model_flops_do_not(flags, repeated):
    shape = "--model.family gpt --model.layers 2 --model.hidden 64 --model.heads 4 --model.vocab-size 256"
    run = f"{shape} --train.steps 1 --train.seq-len 128 --train.micro-batch-size 4 {flags}"
    config = load_run(None, environment={}, flags=run.split()).config
    rates = Speedometer(config, Device(torch.device("cpu"))).measure(seconds=2.0)
    model_flops = 452_984_832 - 3 * 16_777_216  # without the half of the scores that the mask hides
    assert rates["model_tflops_per_device"] == pytest.approx(model_flops / 2e12)
    assert rates["hardware_tflops_per_device"] == pytest.approx((model_flops + repeated) / 2e12)
