"""Saves in the background: training goes on meanwhile, and what is saved is the state of that moment."""

import os
import shutil
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from checkpoint.test_round_trip import assert_same, build, everything, train
from polarlm.checkpoint import Checkpoints
from polarlm.checkpoint.tensors import local_part, read_tensors, write_tensors
from polarlm.config import UserError
from ranks import run_ranks


def save_and_train_on(world, folder, layout):
    """Save after each of three steps with no pause, and give what the state was then."""
    model, optimizer = build(layout)
    checkpoints = Checkpoints(folder, 3, world, in_background=True)
    states = []
    for step in range(1, 4):
        train(model, optimizer, [step])
        checkpoints.save(step, model, optimizer, {"step": step})
        states.append(everything(model, optimizer))
    train(model, optimizer, [4])
    checkpoints.wait()
    loaded = []
    for step in range(1, 4):
        other, its_optimizer = build(layout, seed=1)
        assert checkpoints.load(step, other, its_optimizer) == {"step": step}
        loaded.append(everything(other, its_optimizer))
    return states, loaded, checkpoints.completed(), checkpoints.completed()


@pytest.mark.parametrize("layout", [(), (2, 1), (2,)])
def test_what_is_saved_is_the_state_of_that_moment(layout, tmp_path):
    for states, loaded, completed, completed_since in run_ranks(
        layout[0] if layout else 1, save_and_train_on, tmp_path, layout
    ):
        for state, other in zip(states, loaded, strict=True):
            assert_same(other, state)
        assert completed == [1, 2, 3]
        assert completed_since == []


def test_latest_moves_when_the_disk_has_everything(alone, tmp_path, monkeypatch):
    model, optimizer = build()
    checkpoints = Checkpoints(tmp_path, 3, alone, in_background=True)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()

    disk_is_ready, sync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: disk_is_ready.wait() and sync(descriptor))
    checkpoints.save(2, model, optimizer, {})
    assert os.readlink(tmp_path / "latest") == "step-1"
    assert not (tmp_path / "step-2").exists()
    assert checkpoints.completed() == [1]
    disk_is_ready.set()
    checkpoints.wait()
    assert os.readlink(tmp_path / "latest") == "step-2"
    assert checkpoints.completed() == [2]


def _addresses_over_saves(world, folder):
    model, optimizer = build((2, 1))
    checkpoints = Checkpoints(folder, 3, world, in_background=True)
    addresses = []
    for step in range(1, 4):
        train(model, optimizer, [step])
        checkpoints.save(step, model, optimizer, {})
        checkpoints.wait()
        buffers = [staging._buffers for staging in checkpoints._staging.values()]
        addresses.append({name: each.data_ptr() for part in buffers for name, each in part.items()})
    return addresses


def test_memory_is_taken_once_and_for_what_this_rank_writes_alone(tmp_path):
    first, second = run_ranks(2, _addresses_over_saves, tmp_path)
    for of_rank in (first, second):
        assert of_rank[0] == of_rank[1] == of_rank[2]
    # Both hold everything alike, and each writes, so copies, a part.
    assert min(len(first[0]), len(second[0])) > 0
    assert not first[0].keys() & second[0].keys()
    names = {name for name, _ in build()[0].named_parameters()}
    moments = {f"{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq")}
    assert first[0].keys() | second[0].keys() == names | moments


TENSORS = {
    "wide": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "narrow": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "empty": torch.empty(0, 5),
    "single": torch.tensor(7, dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "größe": torch.tensor([3], dtype=torch.int16),
}


def test_the_files_are_plain_safetensors_to_other_readers(tmp_path):
    writer = write_tensors(TENSORS, {name: local_part(each) for name, each in TENSORS.items()}, tmp_path / "weights")
    (file,) = writer.files
    path = tmp_path / "weights" / file.name
    assert path.stat().st_size == file.bytes
    assert_same(load_file(path), TENSORS)
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"

    filled = {name: torch.zeros_like(each) for name, each in TENSORS.items()}
    dcp.load(filled, storage_reader=HuggingFaceStorageReader(str(tmp_path / "weights")), no_dist=True)
    assert_same(filled, TENSORS)


def test_files_that_torchs_own_writer_made_go_on_loading(tmp_path):
    tensors = {name: each.contiguous() for name, each in TENSORS.items()}
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True)
    filled = {name: torch.zeros_like(each) for name, each in tensors.items()}
    read_tensors(filled, tmp_path)
    assert_same(filled, tensors)


def _save_into_own_folders(world, folder):
    model, optimizer = build((2,))
    here = folder / str(world.rank)
    (here / ".step-1.partial").mkdir(parents=True)
    with pytest.raises(UserError) as refusal:
        Checkpoints(here, 1, world).save(1, model, optimizer, {})
    return str(refusal.value)


def test_hosts_that_share_no_folder_are_told_so(tmp_path):
    for said in run_ranks(2, _save_into_own_folders, tmp_path):
        assert "weights/shard-00002.safetensors lies on another host's own disk; share the run's folder" in said


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_whose_folder_has_gone_ends_and_leaves_no_part_of_one(in_background, alone, tmp_path):
    model, optimizer = build()
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = Checkpoints(run / "checkpoints", 1, alone, in_background)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()
    shutil.rmtree(run / "checkpoints")  # these alone are made again
    checkpoints.save(2, model, optimizer, {})
    checkpoints.wait()
    assert checkpoints.newest() == 2

    shutil.rmtree(run)

    def save_and_wait():
        checkpoints.save(3, model, optimizer, {})
        checkpoints.wait()

    with pytest.raises(UserError, match=r"run/checkpoints: step 3 cannot be saved \(No such file or directory\)"):
        save_and_wait()
    assert not run.exists()
