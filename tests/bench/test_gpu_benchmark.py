"""`benchmarks/gpu.py` without a GPU: whole models from made-up rows of known cost a layer, the marks, and the line that
says that nothing was measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polarlm.bench import OOM, Row
from polarlm.parallel import Device
from polarlm.plan import count_parameters
from polarlm.train.speed import Speedometer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
A100 = "NVIDIA A100-SXM4-80GB"
OUTSIDE_S, LAYER_S = 0.125, 0.0625
OUTSIDE_BYTES, LAYER_BYTES, TOKEN_BYTES = 3_000_000_000, 5_000_000, 10_000


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    return gpu


def _rows(gpu, layer_s=LAYER_S, token_bytes=TOKEN_BYTES):
    """Of a device whose steps and memory are lines in layers, and memory beside the states in tokens too."""
    rows = {}
    for run in gpu.choose_runs([gpu.LLAMA, gpu.GPT], is_quick=False):
        model = run.config().model
        beside = OUTSIDE_BYTES + LAYER_BYTES * model.layers + token_bytes * run.seq_len
        numbers = {
            "step_time_s": OUTSIDE_S + layer_s * model.layers,
            "peak_memory_bytes": 16 * count_parameters(model) + beside,
        }
        rows[run] = Row(run.name, 1, run.seq_len, "ok", numbers)
    return rows


def test_whole_models_from_few_layers(gpu):
    result = gpu.conclude(_rows(gpu), A100)
    whole = {(each["preset"], each["seq_len"]): each for each in result["whole"]}
    assert list(whole) == [(preset, length) for preset in ("Llama3_8B", "GPT1_5B") for length in gpu.LENGTHS]
    for (preset, length), each in whole.items():
        layers = {"Llama3_8B": 32, "GPT1_5B": 48}[preset]
        config = gpu.Run(preset, None, length).config()
        assert each["step_time_s"] == pytest.approx(OUTSIDE_S + layers * LAYER_S)
        assert each["outside_layers_time_s"] == pytest.approx(OUTSIDE_S)
        beside = OUTSIDE_BYTES + layers * LAYER_BYTES + TOKEN_BYTES * length
        assert each["beside_states_bytes"] == pytest.approx(beside, rel=1e-9)
        assert each["state_bytes"] == 16 * count_parameters(config.model)
        # As a run of the whole model would say it.
        rates = Speedometer(config, Device(torch.device("cpu"))).measure(OUTSIDE_S + layers * LAYER_S)
        for name in rates.keys() - {"mfu", "samples_per_sec", "tokens_per_sec_per_device"}:
            assert each[name] == pytest.approx(rates[name]), name
        assert each["mfu"] == pytest.approx(rates["model_tflops_per_device"] / 312)
    assert whole["Llama3_8B", 8192]["layer_memory_bytes"] == pytest.approx(16 * 218_112_000 + LAYER_BYTES)
    assert result["all_layers"] == pytest.approx({"step_time": 1, "peak_memory": 1})


def test_marks(gpu):
    speed, *memory = gpu.conclude(_rows(gpu), A100)["marks"]
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    flops = 8192 * (6 * matrices + 32 * 6 * 8192 * 4096)  # attention's causal half
    mfu = flops / (OUTSIDE_S + 32 * LAYER_S) / 312e12
    assert speed["verdict"] == "pass"
    assert f"MFU {mfu:.1%}" in speed["what"]
    assert [mark["verdict"] for mark in memory] == ["pass", "pass", "pass", "pass"]
    activations = (OUTSIDE_BYTES + 32 * LAYER_BYTES + 500_000 * TOKEN_BYTES) / 1e9
    assert all(f"{activations:.1f} GB extrapolated" in mark["what"] for mark in memory)
    assert "64.2 GB of states" in memory[0]["what"]  # 8 bytes of each of 8.03e9 parameters
    assert "131 GB of block inputs on the host" in memory[0]["what"]


def test_marks_fail_or_say_that_they_were_not_measured(gpu):
    verdicts = [mark["verdict"] for mark in gpu.conclude(_rows(gpu, 2 * LAYER_S, 10 * TOKEN_BYTES), A100)["marks"]]
    assert verdicts == [*["fail"] * 3, *["pass"] * 2]  # 53 GB, and 64, 43, 25 or 16 of states

    rows = {
        run: row if run.seq_len < 8192 else Row(run.name, 1, run.seq_len, OOM, {}) for run, row in _rows(gpu).items()
    }
    result = gpu.conclude(rows, A100)
    assert {mark["verdict"] for mark in result["marks"]} == {"not measured"}
    assert {each["seq_len"] for each in result["whole"]} == {2048}


def test_no_layer_takes_less_than_none(gpu):
    assert gpu.conclude(_rows(gpu, layer_s=0.0), A100)["whole"] == []


def test_without_a_gpu_it_says_so():
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "opencl:cpu"}
    done = subprocess.run([sys.executable, SCRIPT], env=os.environ | no_gpu, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "no GPU here, so nothing was measured and the table is empty\n")
