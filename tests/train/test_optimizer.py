"""Optimizers against their formulas in float64, and what each parameter is given to."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from polarlm.config import OptimizerConfig, load_run
from polarlm.train import build_optimizer, fit, open_run
from polarlm.train.muon import _share_out, orthogonalise
from ranks import run_ranks


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleDict({"0": nn.Linear(4, 6), "1": nn.Linear(6, 4)})


def _step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_decay_is_on_matrices_only():
    optimizer = build_optimizer(_Model(), OptimizerConfig(weight_decay=0.3))
    decays = {tuple(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {(7, 4): 0.3, (6, 4): 0.3, (4, 6): 0.3, (6,): 0.0, (4,): 0.0}


@pytest.mark.parametrize(("name", "in_host_memory"), [("adamw", False), ("adamw", True), ("muon", False)])
def test_without_the_fused_kernel_adamw_takes_the_same_steps(name, in_host_memory):
    fused, plain = _Model(), _Model()
    optimizers = []
    for model, switch in ((fused, True), (plain, False)):
        config = OptimizerConfig(name=name, lr=0.01, fused=switch)
        optimizers.append(build_optimizer(model, config, in_host_memory=in_host_memory))
        for seed in range(3):
            _step(model, optimizers[-1], seed)
    switches = [
        (optimizer.param_groups[-1]["fused"], optimizer.param_groups[-1].get("foreach")) for optimizer in optimizers
    ]
    assert switches in ([(True, None), (False, True)], [(True, False), (False, True)])
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter, fused.get_parameter(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    result = orthogonalise(matrix[None])[0].double()
    # In the basis of the matrix's own singular vectors the result is diagonal, its entries within the quintic's band.
    inner = left.mT @ result @ right.mT
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-5
    assert ((inner.diagonal() > 0.6) & (inner.diagonal() < 1.3)).all()


def _muon_by_the_formula(weight, gradients, lr, decay):
    """Nesterov momentum, the quintic iteration, update of RMS 0.2, decoupled decay; in float64."""
    weight, momentum = weight.double(), torch.zeros_like(weight).double()
    for gradient in (g.double() for g in gradients):
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        weight = weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(weight.shape)) * x
    return weight


def test_muon_is_its_formula_on_matrices_and_adamw_on_the_rest():
    model, twin = _Model(), _Model()
    muon = build_optimizer(model, OptimizerConfig(name="muon", lr=0.01, weight_decay=0.1))
    adamw = build_optimizer(twin, OptimizerConfig(lr=0.01, weight_decay=0.1))
    start, gradients = model.blocks["1"].weight.detach().clone(), []
    for seed in range(3):
        _step(model, muon, seed)
        _step(twin, adamw, seed)
        gradients.append(model.blocks["1"].weight.grad.clone())
    expected = _muon_by_the_formula(start, gradients, 0.01, 0.1)
    assert (model.blocks["1"].weight.double() - expected).norm() < 1e-5 * expected.norm()
    for name in ("embedding.weight", "blocks.0.bias", "blocks.1.bias"):
        assert torch.equal(model.get_parameter(name), twin.get_parameter(name))
    assert not torch.equal(model.blocks["0"].weight, twin.blocks["0"].weight)


def _orthogonalise_with(world, matrices):
    return _share_out(matrices, torch.distributed.group.WORLD)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_ranks_share_out_matrices_whatever_their_number(count):
    matrices = torch.randn((count, 5, 3), generator=torch.Generator().manual_seed(2))
    for result in run_ranks(3, _orthogonalise_with, matrices):
        torch.testing.assert_close(result, orthogonalise(matrices))


def test_adafactor_takes_the_steps_of_torchs():
    model, twin = _Model(), _Model()
    config = OptimizerConfig(name="adafactor", lr=0.02, weight_decay=0.1)
    ours = build_optimizer(model, config)
    matrices, vectors = ([p for p in twin.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    torchs = torch.optim.Adafactor([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.02)
    for seed in range(3):
        _step(model, ours, seed)
        _step(twin, torchs, seed)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, twin.get_parameter(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_a_state_that_is_saved_and_loaded_goes_on_bit_identically(name, tmp_path):
    from polarlm.checkpoint import Checkpoints
    from polarlm.parallel import Device, World

    alone = World(0, 1, Device(torch.device("cpu")))
    config = OptimizerConfig(name=name, lr=0.01)
    model, resumed = _Model(), _Model()
    optimizer, other = build_optimizer(model, config), build_optimizer(resumed, config)
    _step(model, optimizer, 0)
    checkpoints = Checkpoints(tmp_path, 1, alone)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.load(1, resumed, other)
    for seed in (1, 2):
        _step(model, optimizer, seed)
        _step(resumed, other, seed)
    assert all(torch.equal(p, resumed.get_parameter(n)) for n, p in model.named_parameters())


def _train_to(world, folder, steps, flags):
    words = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --data.tokenizer bytes "
    words += f"--train.seq-len 8 --train.global-batch-size 4 --train.steps {steps} --train.schedule.name constant "
    config = load_run(None, environment={}, flags=[*words.split(), f"--parallel.ranks={world.size}", *flags]).config
    run = open_run(folder, config, world)
    fit(run)
    parameters = run.engine.model.named_parameters()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in parameters}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("muon", []), ("muon", ["--parallel.zero-stage", "3"]), ("adafactor", ["--parallel.zero-stage", "3"])],
)
def test_a_resumed_run_on_two_ranks_is_the_straight_one(name, layout, tmp_path):
    flags = ["--train.optimizer.name", name, "--train.optimizer.lr", "1e-2", *layout]
    for folder in ("straight", "resumed"):
        (tmp_path / folder).mkdir()
    straight = run_ranks(2, _train_to, tmp_path / "straight", 4, flags)[0]
    run_ranks(2, _train_to, tmp_path / "resumed", 2, flags)
    resumed = run_ranks(2, _train_to, tmp_path / "resumed", 4, flags)[0]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
