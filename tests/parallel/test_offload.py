"""`parallel.offload: optimizer`: moments in host memory, and the same steps."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel.reference import assert_same_run, plain_steps, rank_batches, run_config, train
from polarlm.checkpoint import Checkpoints
from polarlm.checkpoint.optimizer import fill_optimizer, record_of, take_optimizer
from polarlm.checkpoint.tensors import local_part, write_tensors
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from polarlm.train.host_adamw import HostAdamW
from ranks import run_ranks

OFFLOAD = ["--parallel.offload", "optimizer"]
LAYOUTS = {
    "alone": (1, []),
    **{f"zero {stage} x2": (2, ["--parallel.zero-stage", str(stage)]) for stage in (0, 1, 2, 3)},
    "tensor 2 x zero 3 x2": (4, ["--parallel.tensor", "2", "--parallel.zero-stage", "3"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_in_host_memory_are_the_same(layout):
    ranks, flags = LAYOUTS[layout]
    results = run_ranks(ranks, train, "llama", [*flags, *OFFLOAD], 2, 0.1)
    assert_same_run(results, plain_steps("llama", 0.1))


def test_moments_are_on_the_host_and_parameters_stay_on_their_device():
    def one_step(build, **switches):
        parameter = torch.nn.Parameter(torch.zeros(3, 2, device="meta"))
        parameter.grad = torch.ones_like(parameter)
        optimizer = build([{"params": [parameter], "weight_decay": 0.0}], lr=0.1, **switches)
        optimizer.step()
        moments = {optimizer.state[parameter][key].device.type for key in ("exp_avg", "exp_avg_sq")}
        return parameter.device.type, moments

    with FakeTensorMode():  # tensors without values; `meta` stands for an accelerator
        assert one_step(HostAdamW, fused=True) == ("meta", {"cpu"})
        assert one_step(torch.optim.AdamW) == ("meta", {"meta"})


def test_a_checkpoint_fills_moments_on_the_host(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = HostAdamW([{"params": list(model.parameters())}], lr=0.1, fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    arrays, numbers = take_optimizer(optimizer, model)
    write_tensors(arrays, {name: local_part(each) for name, each in arrays.items()}, tmp_path)
    elsewhere = torch.nn.Linear(3, 2, device="meta")  # stands for an accelerator: state there would have no values
    resumed = HostAdamW([{"params": list(elsewhere.parameters())}], lr=0.2, fused=True)
    fill_optimizer(resumed, elsewhere, tmp_path, record_of([numbers]))
    for before, after in zip(model.parameters(), elsewhere.parameters(), strict=True):
        assert resumed.state[after].keys() == optimizer.state[before].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in optimizer.state[before].items():
            assert torch.equal(resumed.state[after][key], value), key


def _train_and_save(world, folder, flags, steps, resume):
    config = run_config("llama", world.size, flags)
    engine = Engine(config, world)
    offloads = config.parallel.offload == "optimizer"
    optimizer = build_optimizer(engine.model, config.train.optimizer, in_host_memory=offloads)
    checkpoints = Checkpoints(folder, keep_last=9, world=world)
    if resume:
        checkpoints.load(resume, engine.model, optimizer)
    losses = []
    for step in steps:
        batches = rank_batches(step, engine.data_rank, engine.data_ranks, 2)
        losses.append(train_step(engine, optimizer, batches, clip=1.0).loss)
    checkpoints.save(steps[-1] + 1, engine.model, optimizer, {})
    return losses


@pytest.mark.parametrize(("first", "then"), [(OFFLOAD, OFFLOAD), ([], OFFLOAD), (OFFLOAD, [])])
def test_a_run_goes_on_from_host_memory_and_into_it(first, then, tmp_path):
    zero3 = ["--parallel.zero-stage", "3"]
    [straight] = run_ranks(1, _train_and_save, tmp_path / "straight", [], range(6), None)
    run_ranks(2, _train_and_save, tmp_path / "resumed", [*zero3, *first], range(3), None)
    for losses in run_ranks(2, _train_and_save, tmp_path / "resumed", [*zero3, *then], range(3, 6), 3):
        assert losses == pytest.approx(straight[3:], rel=1e-5)
