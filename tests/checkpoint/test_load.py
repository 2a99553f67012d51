"""Weights alone, from a run or a checkpoint, for another run or for use."""

import shutil

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from polarlm.checkpoint import Checkpoints, folders, load, load_model, load_weights
from polarlm.config import RunConfig, UserError, dump_run
from polarlm.model import Transformer, initialise
from ranks import run_ranks


def config_of(**model):
    shape = {"layers": 1, "hidden": 8, "heads": 2, "vocab_size": 11, "max_positions": 6, **model}
    train = {"steps": 1, "seq_len": 6}
    return RunConfig.model_validate({"model": shape, "data": {"paths": ["synthetic"]}, "train": train})


def transformer(config, seed):
    model = Transformer(config.model)
    initialise(model, config.model, seed)
    return model


def save(folder, model, step, world):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    Checkpoints(folder / "checkpoints", keep_last=9, world=world).save(step, model, optimizer, {})


@pytest.fixture(params=["gpt", "llama"])
def run(request, tmp_path, alone):
    """A run folder with steps 1 and 2, whose weights are drawn from seeds 1 and 2, and its configuration."""
    config = config_of(family=request.param, tied_embeddings=request.param == "gpt")
    for step in (1, 2):
        save(tmp_path, transformer(config, seed=step), step, alone)
    (tmp_path / "config.yaml").write_text(dump_run(config))
    return tmp_path, config


def logits(model):
    with torch.no_grad():
        return model(torch.arange(6)[None], torch.arange(6)[None])


@pytest.mark.parametrize(("step", "seed"), [(None, 2), (2, 2), (1, 1)])
def test_a_model_from_a_run_folder(run, step, seed):
    folder, config = run
    model = load_model(folder, step)
    assert not model.training
    assert torch.equal(logits(model), logits(transformer(config, seed).eval()))


def test_the_newest_complete_one_is_taken_and_others_refused(run):
    folder, config = run
    (folder / "checkpoints/step-2/complete.json").unlink()
    assert torch.equal(logits(load_model(folder)), logits(transformer(config, 1).eval()))
    with pytest.raises(UserError, match=r"step-2: .*complete\.json is missing"):
        load_model(folder, 2)
    with pytest.raises(UserError, match="no checkpoint of step 7 there; choose 1 or 2"):
        load_model(folder, 7)


def test_a_folder_without_checkpoints_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_run(config_of()))
    with pytest.raises(UserError, match="no complete checkpoint there"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="not a run folder and not a complete checkpoint"):
        load_weights(tmp_path / "nowhere", nn.Linear(1, 1))


@pytest.mark.parametrize("below", ["", "checkpoints/latest", "checkpoints/step-2"])
def test_weights_from_a_run_or_a_checkpoint(run, below):
    folder, config = run
    model = transformer(config, seed=5)
    load_weights(folder / below, model)
    assert all(map(torch.equal, model.parameters(), transformer(config, 2).parameters()))


def test_weights_into_a_sharded_model(run):
    folder, config = run

    def load(world):
        model = transformer(config, seed=5)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        load_weights(folder, model)
        return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}

    expected = dict(transformer(config, 2).named_parameters())
    for weights in run_ranks(2, load):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_names_that_do_not_fit_are_listed_and_nothing_is_filled(tmp_path, alone):
    save(tmp_path, nn.ModuleDict({"same": nn.Linear(2, 2), "grown": nn.Linear(2, 3), "old": nn.Linear(1, 1)}), 1, alone)
    model = nn.ModuleDict({"same": nn.Linear(2, 2), "grown": nn.Linear(2, 4), "new": nn.Linear(1, 1)})
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UserError) as error:
        load_weights(tmp_path, model)
    assert all(map(torch.equal, before, model.parameters()))
    message = str(error.value)
    assert "\n" not in message
    assert "missing: new.weight, new.bias; " in message
    assert "not in the model: old." in message
    assert "of another shape: grown.weight (3×2, in the model 4×2), grown.bias (3, in the model 4)" in message


@pytest.mark.parametrize("reader", ["fill_weights", "_check_model"])
def test_a_checkpoint_that_goes_while_it_is_read_is_one_line(run, reader, monkeypatch):
    """As one that a run deletes which trains meanwhile, whatever torch makes of its missing files."""
    folder, _ = run
    read = getattr(load, reader)

    def read_too_late(*arguments, **options):
        shutil.rmtree(folder / "checkpoints/step-1")
        return read(*arguments, **options)

    monkeypatch.setattr(load, reader, read_too_late)
    with pytest.raises(UserError, match=r"step-1: has gone while it was read.*checkpoint\.keep_last"):
        load_model(folder, 1)


def test_the_newest_is_looked_for_again_when_it_goes(run, monkeypatch, caplog):
    """A run that keeps one has written the next when it deletes this."""
    folder, config = run
    shutil.rmtree(folder / "checkpoints/step-1")
    look = folders.fault_of

    def look_too_late(path, with_digests=False):
        if path.name == "step-2" and path.is_dir():
            path.rename(path.with_name("step-3"))
        return look(path, with_digests)

    monkeypatch.setattr(folders, "fault_of", look_too_late)
    torch.testing.assert_close(logits(load_model(folder)), logits(transformer(config, seed=2)))
    assert not any("passed over" in message for message in caplog.messages)
