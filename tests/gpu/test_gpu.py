"""On an accelerator: the same training as on a CPU, resumed or repeated to the bit, compiled, in bf16 and fp16, with
memory that is counted.

Here only where there is one; elsewhere the end of the tests' output names them (tests/conftest.py).
"""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from polarlm.config import load_run
from polarlm.data import Batch
from polarlm.model import CausalAttention, Documents
from polarlm.model.attention import has_varlen_kernel
from polarlm.parallel import Device, Engine, World, local_device
from polarlm.parallel.host_memory import HostMemory
from polarlm.plan import count_parameters
from polarlm.train import build_optimizer, train_step

pytestmark = pytest.mark.gpu

STEPS, ROWS, LENGTH, VOCABULARY = 5, 8, 128, 512
FIELDS = {
    "model.layers": 4, "model.hidden": 128, "model.heads": 4, "model.vocab-size": VOCABULARY,
    "train.steps": STEPS, "train.seq-len": LENGTH, "train.micro-batch-size": ROWS, "train.optimizer.eps": 1e-6,
}  # fmt: skip
FLAGS = [word for path, value in FIELDS.items() for word in (f"--{path}", str(value))]
LLAMA = ["--model.family", "llama", "--model.kv-heads", "2"]
CPU = Device(torch.device("cpu"))


def _train(device, *flags):
    """Losses and norms of the steps, the gradients of the first, and the weights after the last, all on the CPU."""
    config = load_run(None, environment={}, flags=[*FLAGS, *flags]).config
    engine = Engine(config, World(0, 1, device))
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    steps, gradients = [], {}

    def keep_first(*_):
        if not gradients:
            gradients.update({name: weight.grad.cpu().clone() for name, weight in engine.model.named_parameters()})

    optimizer.register_step_pre_hook(keep_first)
    for step in range(STEPS):
        ids = np.random.default_rng(step).integers(VOCABULARY, size=(ROWS, LENGTH + 1))
        positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH)).copy()
        batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions, None)
        loss_scale = config.train.loss_scale.initial if config.train.precision == "fp16" else 1.0
        result = train_step(engine, optimizer, [batch], clip=1.0, loss_scale=loss_scale)
        steps.append([result.loss, result.grad_norm])
    return torch.tensor(steps), gradients, {name: weight.cpu() for name, weight in engine.model.state_dict().items()}


def _assert_close(found, expected, bound):
    """Each tensor by name, within `bound` of its own norm."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        off = ((tensor.float() - expected[name].float()).norm() / expected[name].float().norm()).item()
        assert off <= bound, f"{name} is off by {off:.2g} of its norm"  # not so for NaN


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_trains_as_a_cpu_does(family):
    steps, gradients, weights = _train(local_device(0), "--model.family", family)
    cpu_steps, cpu_gradients, cpu_weights = _train(CPU, "--model.family", family)
    torch.testing.assert_close(steps, cpu_steps, rtol=1e-4, atol=0)
    _assert_close(gradients, cpu_gradients, 1e-4)
    _assert_close(weights, cpu_weights, 1e-4)


def test_compiled_it_takes_the_same_steps():
    steps, gradients, weights = _train(local_device(0), *LLAMA)
    compiled_steps, compiled_gradients, compiled_weights = _train(local_device(0), *LLAMA, "--train.compile")
    torch.testing.assert_close(compiled_steps, steps, rtol=1e-4, atol=0)
    _assert_close(compiled_gradients, gradients, 1e-4)
    _assert_close(compiled_weights, weights, 1e-4)


@pytest.mark.parametrize("attention", ["flash", "cudnn", "efficient", "math"])
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 2e-2), ("fp16", 4e-3)])
def test_half_precision_stays_near_fp32(precision, bound, attention):
    shape = LLAMA if attention in ("flash", "math") else LLAMA[:2]  # the others may want as many key heads
    steps, gradients, _ = _train(local_device(0), *shape)
    half = ["--train.precision", precision, "--train.attention", attention]
    half_steps, half_gradients, half_weights = _train(local_device(0), *shape, *half)
    torch.testing.assert_close(half_steps, steps, rtol=bound, atol=0)
    _assert_close(half_gradients, gradients, 2.5 * bound)
    assert all(weight.dtype == torch.float32 for weight in half_weights.values())
    assert any(not torch.equal(half_gradients[name], gradients[name]) for name in gradients), (
        f"{precision} was not used"
    )


FULL = [*LLAMA, "--train.recompute", "full", "--train.attention", "math"]


def test_inputs_kept_on_the_host_are_back_in_time():
    steps, gradients, weights = _train(local_device(0), *FULL)
    host_steps, host_gradients, host_weights = _train(local_device(0), *FULL, "--train.offload-activations", "host")
    assert torch.equal(host_steps, steps)
    assert all(torch.equal(host_gradients[name], gradients[name]) for name in gradients)
    assert all(torch.equal(host_weights[name], weights[name]) for name in weights)


def _kept_bytes(*flags):
    """What lives on the device from a forward pass to its backward pass."""
    config = load_run(None, environment={}, flags=[*FLAGS, *FULL, "--model.layers", "12", *flags]).config
    engine = Engine(config, World(0, 1, local_device(0)))
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
    batch = tokens, torch.arange(LENGTH).expand(ROWS, -1), None, tokens
    engine.forward_backward([batch], 1.0)  # the first one makes room for libraries, and gradients
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    loss = engine.loss(batch)
    torch.accelerator.synchronize()
    assert loss.requires_grad
    return torch.accelerator.memory_allocated() - before


def test_inputs_kept_on_the_host_leave_the_device():
    input_bytes = ROWS * LENGTH * FIELDS["model.hidden"] * 4
    saved = _kept_bytes() - _kept_bytes("--train.offload-activations", "host")
    assert saved == pytest.approx(11 * input_bytes, rel=0.05)  # of 12 blocks; the last one's is needed first


def test_host_buffers_are_pinned_and_used_again():
    device, places = local_device(0), []
    memory = HostMemory(device)
    for _ in range(3):
        tensors = [torch.full((256, 1024), float(number), device=device.torch) for number in range(4)]
        kept = [memory.keep(tensor.clone(), number) for number, tensor in enumerate(tensors)]
        assert all(each.buffer.is_pinned() for each in kept)
        places.append({each.buffer.data_ptr() for each in kept})
        back = [memory.unpack(each) for each in reversed(kept)]
        assert all(torch.equal(one, other) for one, other in zip(reversed(back), tensors, strict=True))
        del kept
    assert places[0] == places[1] == places[2]


def test_bf16_parameters_stay_near_fp32():
    steps, gradients, _ = _train(local_device(0), *LLAMA)
    bf16 = ["--train.precision", "bf16", "--train.parameter-precision", "bf16"]
    bf16_steps, bf16_gradients, bf16_weights = _train(local_device(0), *LLAMA, *bf16)
    torch.testing.assert_close(bf16_steps, steps, rtol=2e-2, atol=0)
    _assert_close(bf16_gradients, gradients, 5e-2)
    assert all(weight.dtype == torch.float32 for weight in bf16_weights.values())


def test_without_the_fused_kernel_adamw_takes_the_same_steps():
    _, _, weights = _train(local_device(0), *LLAMA)
    _, _, plain_weights = _train(local_device(0), *LLAMA, "--train.optimizer.fused", "false")
    _assert_close(plain_weights, weights, 1e-4)


@pytest.mark.parametrize(("precision", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_packed_documents_are_as_under_a_dense_mask(precision, bound, kv_heads):
    device, generator = local_device(0).torch, torch.Generator().manual_seed(1)
    shapes = [(2, heads, LENGTH, 32) for heads in (2, kv_heads, kv_heads, 2)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, precision) for shape in shapes)
    inputs, ids = [x.requires_grad_() for x in (q, k, v)], torch.stack([torch.arange(LENGTH) // n for n in (1, 50)])
    output = CausalAttention()(*inputs, Documents(ids, device))
    assert has_varlen_kernel(q) == (precision != torch.float32)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril().to(device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
    gradients = torch.autograd.grad(output, inputs, grad), torch.autograd.grad(expected, exact, grad.double())
    for found, value in [(output, expected), *zip(*gradients, strict=True)]:
        assert (found.double() - value).norm() <= bound * grad.norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_norms_take_the_same_steps(precision):
    flags = [*LLAMA, "--train.precision", precision]
    bound = 1e-4 if precision == "fp32" else 2e-2
    steps, gradients, _ = _train(local_device(0), *flags)
    plain_steps, plain_gradients, _ = _train(local_device(0), *flags, "--train.fused-norms", "false")
    torch.testing.assert_close(steps, plain_steps, rtol=bound, atol=0)
    _assert_close(gradients, plain_gradients, 2.5 * bound)


def test_memory_is_the_devices_and_holds_the_training_state():
    device = local_device(0)
    torch.accelerator.reset_peak_memory_stats()
    _train(device, *LLAMA)
    config = load_run(None, environment={}, flags=[*FLAGS, *LLAMA]).config
    state = 4 * 4 * count_parameters(config.model)  # weights, gradients, two moments in fp32
    activations = ROWS * LENGTH * config.model.hidden * 4 * config.model.layers
    assert device.peak_memory_bytes() == torch.accelerator.max_memory_allocated()
    assert state + activations < device.peak_memory_bytes() < 20 * (state + activations)


def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    flags = [*FLAGS, *LLAMA, "--train.attention", "math", "--parallel.ranks", "1", "--checkpoint.every", "2"]
    flags += ["--model.dropout", "0.1"]
    _polarlm(whole, *flags)
    _polarlm(parted, *flags)
    for step in (4, 5):  # as if it had been killed after step 3
        shutil.rmtree(parted / "runs/run/checkpoints" / f"step-{step}")
    _polarlm(parted, *flags, "--resume")
    losses = [_losses(folder / "runs/run/metrics.jsonl") for folder in (whole, parted)]
    assert losses[0] == losses[1]
    assert all(map(math.isfinite, losses[0]))
    whole_weights, weights = (_weights(folder / f"runs/run/checkpoints/step-{STEPS}") for folder in (whole, parted))
    assert whole_weights.keys() == weights.keys()
    assert all(torch.equal(weights[name], whole_weights[name]) for name in weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_deterministic_runs_are_equal_to_the_bit(tmp_path, precision):
    flags = [*FLAGS, *LLAMA, "--parallel.ranks", "1", "--train.deterministic", "--train.precision", precision]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        _polarlm(folder, *flags, "--model.dropout", "0.1")
    one, two = (_losses(folder / "runs/run/metrics.jsonl") for folder in folders)
    assert one == two
    weights, again = (_weights(folder / f"runs/run/checkpoints/step-{STEPS}") for folder in folders)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    environment = json.loads((folders[0] / "runs/run/environment.json").read_text())
    assert environment["deterministic"]["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")


def _polarlm(folder, *flags):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "polarlm", "train", "--name", "run", *flags]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def _losses(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def _weights(checkpoint):
    """Every tensor of a checkpoint, the optimizer's too."""
    tensors = {}
    for file in checkpoint.rglob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
