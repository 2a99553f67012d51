"""What is saved comes back, bit for bit, on the same layout and on every other."""

import pickle

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from polarlm.checkpoint import Checkpoints
from polarlm.config import UserError
from ranks import run_ranks

LAYOUTS = {"one": (), "replicated": (2, 1), "sharded": (2,)}


class Tiny(nn.Module):
    """Sizes that two ranks cannot halve, one that they cannot share at all, and a tied pair."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.middle = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.middle(self.table(tokens))) * self.scale)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, fused=True)


def build(layout=(), seed=0, optimizer=adamw):
    torch.manual_seed(seed)
    model = Tiny()
    if layout:
        names = ("dp_replicate", "dp_shard")[-len(layout) :]
        mesh = init_device_mesh("cpu", layout, mesh_dim_names=names)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, optimizer(model.parameters())


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        tokens = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everything(model, optimizer):
    """Every tensor of the training state, whole, by one-process names."""
    named = dict(model.named_parameters())
    moments = {
        f"{name}.{key}": whole(value)
        for name, parameter in named.items()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
    return {name: whole(parameter) for name, parameter in named.items()} | moments


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def save_after_two_steps(world, folder, layout):
    """The state when it was saved, and losses and state two steps later."""
    model, optimizer = build(layout)
    train(model, optimizer, range(2))
    Checkpoints(folder, keep_last=1, world=world).save(2, model, optimizer, {"step": 2})
    return everything(model, optimizer), train(model, optimizer, range(2, 4)), everything(model, optimizer)


def load_and_go_on(world, folder, layout):
    """The state as loaded, and losses and state two steps later."""
    model, optimizer = build(layout, seed=1)
    checkpoints = Checkpoints(folder, keep_last=1, world=world)
    assert checkpoints.load(checkpoints.newest(), model, optimizer) == {"step": 2}
    return everything(model, optimizer), train(model, optimizer, range(2, 4)), everything(model, optimizer)


def ranks_of(layout):
    return layout[0] if layout else 1


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_any_layout_goes_on_under_any_other(saved, loaded, tmp_path):
    layout, other = LAYOUTS[saved], LAYOUTS[loaded]
    before, straight_losses, straight_end = run_ranks(ranks_of(layout), save_after_two_steps, tmp_path, layout)[0]
    for after, losses, end in run_ranks(ranks_of(other), load_and_go_on, tmp_path, other):
        assert_same(after, before)
        assert losses == pytest.approx(straight_losses, rel=1e-5)
        if layout == other:
            assert losses == straight_losses
            assert_same(end, straight_end)


def test_a_replicated_tensor_is_written_whole_and_once(tmp_path):
    before = run_ranks(2, save_after_two_steps, tmp_path, (2, 1))[0][0]
    read = {}
    for path in tmp_path.glob("step-2/*/*.safetensors"):
        with safe_open(path, "pt") as shard:
            assert not read.keys() & set(shard.keys())
            read |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    assert_same(read, {name: tensor for name, tensor in before.items() if tensor.ndim})
    assert "table.weight" in read
    assert "head.weight" not in read


def test_pieces_of_a_sharded_tensor_stand_in_rank_order(tmp_path):
    before = run_ranks(2, save_after_two_steps, tmp_path, (2,))[0][0]
    pieces = []
    for path in sorted(tmp_path.glob("step-2/weights/*.safetensors")):
        with safe_open(path, "pt") as shard:
            pieces.append(shard.get_tensor("table.weight"))
    assert [len(piece) for piece in pieces] == [4, 3]
    assert torch.equal(torch.cat(pieces), before["table.weight"])


def test_a_sharded_model_can_be_saved_right_after_an_evaluation(tmp_path):
    def evaluate_then_save(world):
        model, optimizer = build((2,))
        train(model, optimizer, range(2))
        before = everything(model, optimizer)
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64))
        Checkpoints(tmp_path, keep_last=1, world=world).save(2, model, optimizer, {"step": 2})
        return before

    before = run_ranks(2, evaluate_then_save)[0]
    assert_same(run_ranks(1, load_and_go_on, tmp_path, ())[0][0], before)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    ],
    ids=["sgd", "momentum", "nadam", "adafactor"],
)
def test_every_optimizer_goes_on_as_if_nothing_had_been(optimizer, alone, tmp_path):
    model, optimizer_there = build(optimizer=optimizer)
    train(model, optimizer_there, range(3))
    checkpoints = Checkpoints(tmp_path, keep_last=1, world=alone)
    checkpoints.save(3, model, optimizer_there, {})
    resumed, optimizer_here = build(seed=1, optimizer=optimizer)
    train(resumed, optimizer_here, range(7, 9))
    checkpoints.load(3, resumed, optimizer_here)
    assert train(model, optimizer_there, range(3, 6)) == train(resumed, optimizer_here, range(3, 6))
    assert_same(everything(model, optimizer_there), everything(resumed, optimizer_here))


def test_nothing_remains_of_the_state_before_a_load(alone, tmp_path):
    model, optimizer = build()
    checkpoints = Checkpoints(tmp_path, keep_last=1, world=alone)
    checkpoints.save(0, model, optimizer, {})
    straight = train(model, optimizer, range(3))
    checkpoints.load(0, model, optimizer)
    assert train(model, optimizer, range(3)) == straight


def test_numbers_of_groups_come_back_and_switches_stay(alone, tmp_path):
    def two_groups(parameters, fused, **numbers):
        matrices, vectors = [], []
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        return torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], fused=fused, **numbers
        )

    model, optimizer = build(optimizer=lambda p: two_groups(p, fused=True, lr=0.02, betas=(0.8, 0.7), weight_decay=0.3))
    train(model, optimizer, range(1))
    checkpoints = Checkpoints(tmp_path, keep_last=1, world=alone)
    checkpoints.save(1, model, optimizer, {})
    other, loaded = build(optimizer=lambda p: two_groups(p, fused=False, lr=0.5))
    checkpoints.load(1, other, loaded)
    assert [(group["lr"], group["betas"], group["weight_decay"], group["fused"]) for group in loaded.param_groups] == [
        (0.02, (0.8, 0.7), 0.3, False),
        (0.02, (0.8, 0.7), 0.0, False),
    ]


def test_another_set_of_trained_parameters_is_refused(alone, tmp_path):
    model, optimizer = build()
    checkpoints = Checkpoints(tmp_path, keep_last=1, world=alone)
    checkpoints.save(1, model, optimizer, {})
    with pytest.raises(
        UserError, match=r"other parameters were trained \(middle\.bias, middle\.weight, table\.weight\)"
    ):
        checkpoints.load(1, model, torch.optim.SGD([model.scale], lr=1))


def test_low_precision_comes_back_as_it_was(alone, tmp_path):
    model, optimizer = build()
    model.to(torch.bfloat16)
    train(model, optimizer, range(1))
    checkpoints = Checkpoints(tmp_path, keep_last=1, world=alone)
    checkpoints.save(1, model, optimizer, {})
    other, other_optimizer = build(seed=1)
    other.to(torch.bfloat16)
    checkpoints.load(1, other, other_optimizer)
    assert_same(everything(other, other_optimizer), everything(model, optimizer))


def test_files_are_safetensors_and_json_and_no_pickle_takes_part(alone, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    for module, name in [(pickle, "dump"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(module, name, refuse)
    model, optimizer = build()
    train(model, optimizer, range(1))
    checkpoints = Checkpoints(tmp_path, keep_last=1, world=alone)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.load(checkpoints.newest(), model, optimizer)
    names = {path.relative_to(tmp_path / "step-1").as_posix() for path in tmp_path.glob("step-1/**/*.*")}
    shard = "shard-00001.safetensors"
    assert names == {"complete.json", "state.json", f"weights/{shard}", f"optimizer/{shard}"}
