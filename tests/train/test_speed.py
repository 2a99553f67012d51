"""Speed is counted from the work of the whole run, whatever its layout, and never once a rank."""

import pytest
import torch

from polarlm.config import load_run
from polarlm.parallel import Device
from polarlm.plan import device_peak
from polarlm.train.speed import Speedometer
from polarlm.train.speed import _measured_tflops as measured_tflops  # before it is replaced
from train.trained import train_in

SHAPE = "--model.family llama --model.layers 2 --model.hidden 32 --model.heads 4 --model.vocab-size 257"
TRAIN = "--train.steps 3 --train.seq-len 16 --train.global-batch-size 4 --data.tokenizer bytes"


class _A100(Device):
    """A device of a known peak, where there is none."""

    name = "NVIDIA A100-SXM4-40GB"


def _config(*flags):
    return load_run(None, environment={}, flags=[*SHAPE.split(), *TRAIN.split(), *flags]).config


@pytest.mark.parametrize(
    "layout",
    [
        ["--parallel.tensor", "2"],
        ["--parallel.context", "2"],
        ["--parallel.context", "2", "--parallel.context-method", "ulysses"],
        ["--parallel.zero-stage", "3"],
    ],
)
def test_two_ranks_count_the_tokens_and_flops_of_one(tmp_path, layout):
    """L08."""
    alone = train_in(tmp_path / "alone", _config())
    both = train_in(tmp_path / "both", _config("--parallel.ranks", "2", *layout))
    for line, expected in zip(both, alone, strict=True):
        assert (line["samples"], line["tokens"]) == (expected["samples"], expected["tokens"])
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        for name, amount in _work(expected, ranks=1).items():
            assert _work(line, ranks=2)[name] == pytest.approx(amount, rel=1e-9), name
    assert [line["tokens"] for line in both] == [64, 128, 192]


def _work(line, ranks):
    """What the rates of a step come to over its time, all devices together."""
    rates = {"samples_per_sec": 1, "tokens_per_sec": 1} | {
        name: ranks
        for name in line
        if name.endswith("_per_device")  # tokens, and three ways to count operations
    }
    assert len(rates) == 6
    return {name: line[name] * line["step_time_s"] * devices for name, devices in rates.items()}


def test_accumulation_and_recomputation_change_no_model_flops():
    """B39: the model's operations are those of the global batch; recomputation adds to the hardware's alone."""
    device = _A100(torch.device("cpu"))
    plain = Speedometer(_config("--train.micro-batch-size", "4"), device).measure(0.5)
    for micro in ("1", "2"):
        assert Speedometer(_config("--train.micro-batch-size", micro), device).measure(0.5) == plain
    config = _config()
    recomputing = config.model_copy(update={"train": config.train.model_copy(update={"recompute": "full"})})
    recomputed = Speedometer(recomputing, device).measure(0.5)
    assert recomputed["model_tflops_per_device"] == plain["model_tflops_per_device"]
    assert recomputed["mfu"] == plain["mfu"]
    assert recomputed["hardware_tflops_per_device"] > plain["hardware_tflops_per_device"]


def test_an_unknown_devices_peak_is_measured():
    """A core of any machine of today takes between 1 and 1000 fp32 GFLOPS."""
    assert 1e-3 < measured_tflops(Device(torch.device("cpu")), size=256, tries=10) < 1


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 19.5), ("bf16", 312.0), ("fp16", 312.0)])
def test_mfu_is_operations_over_time_devices_and_peak(precision, peak):
    """B39: on four devices, 64 tokens of a model whose operations are counted on paper."""
    speedometer = Speedometer(
        _config("--parallel.ranks", "4", "--train.precision", precision), _A100(torch.device("cpu"))
    )
    # A token's forward: two blocks of 4 products 32 x 32, 3 of 32 x 128, scores over half of 16 places; head 32 x 257.
    forward = 2 * (2 * (4 * 32 * 32 + 3 * 32 * 128) + 4 * 16 * 32 // 2) + 2 * 32 * 257
    assert speedometer.measure(0.25)["mfu"] == pytest.approx(3 * 64 * forward / (0.25 * 4 * peak * 1e12))
    assert device_peak(_A100.name).tflops(precision) == peak
