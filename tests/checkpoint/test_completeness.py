"""A checkpoint is whole or not there: what is damaged or half-written is passed over, with a word, and replaced."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch
from torch import nn

from polarlm.checkpoint import Checkpoints
from polarlm.config import UserError
from ranks import run_ranks


class Constant(nn.Module):
    """A model that carries the number of its step in every weight, and an optimizer that holds something."""

    def __init__(self, step=0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((50, 40), float(step)))
        self.weight.grad = torch.ones_like(self.weight)

    def save(self, checkpoints, step):
        nn.init.constant_(self.weight, step)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.9)
        optimizer.step()
        checkpoints.save(step, self, optimizer, {"step": step})


def loaded(checkpoints, step):
    """The step that the loaded weights carry."""
    model = Constant()
    progress = checkpoints.load(step, model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    assert progress == {"step": model.weight.unique().item()}
    return progress["step"]


@pytest.fixture
def checkpoints(alone, tmp_path):
    """Steps 10 and 20."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=3, world=alone)
    for step in (10, 20):
        Constant().save(checkpoints, step)
    return checkpoints


def shard(folder):
    return next(folder.glob("weights/*.safetensors"))


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "shard cut": (lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-1]), "bytes, not the"),
    "shard empty": (lambda folder: shard(folder).write_bytes(b""), "has 0 bytes"),
    "shard gone": (lambda folder: shard(folder).unlink(), "is missing"),
    "shard added": (lambda folder: shutil.copy(shard(folder), folder / "weights/b.safetensors"), "not written with it"),
    "byte flipped": (lambda folder: flip_a_byte(shard(folder)), "other bytes than were written"),
    "state cut": (lambda folder: (folder / "state.json").write_text("{"), "bytes, not the"),
    "mark gone": (lambda folder: (folder / "complete.json").unlink(), "not written to its end"),
    "mark cut": (lambda folder: (folder / "complete.json").write_text('{"fi'), "complete.json is damaged"),
    "mark of another kind": (lambda folder: (folder / "complete.json").write_text("[]"), "complete.json is damaged"),
    "everything gone": (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "not written to its end"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_passed_over_and_replaced(kind, checkpoints, caplog):
    """B29."""
    damage, reason = DAMAGE[kind]
    damage(checkpoints.folder / "step-20")
    assert (checkpoints.folder / "latest").readlink().name == "step-20"
    assert checkpoints.newest() == 10
    (line,) = caplog.messages
    assert "step-20: passed over" in line
    assert reason in line
    assert loaded(checkpoints, 10) == 10

    Constant().save(checkpoints, 20)
    assert checkpoints.newest() == 20
    assert loaded(checkpoints, 20) == 20


@pytest.mark.parametrize("kind", DAMAGE.keys() - {"byte flipped"})
def test_a_damaged_one_asked_for_by_name_is_an_error(kind, checkpoints):
    DAMAGE[kind][0](checkpoints.folder / "step-20")
    for ask in (checkpoints.progress, lambda step: loaded(checkpoints, step)):
        with pytest.raises(UserError, match="step-20: not a complete checkpoint"):
            ask(20)


def test_every_rank_hears_of_the_same_checkpoint_and_the_same_fault(checkpoints):
    def ask(world):
        here = Checkpoints(checkpoints.folder, keep_last=3, world=world)
        newest = here.newest()
        with pytest.raises(UserError, match="step-30"):
            here.progress(30)
        return newest, here.progress(newest)

    assert run_ranks(2, ask) == [(20, {"step": 20})] * 2


def test_nothing_saved_yet(alone, tmp_path):
    assert Checkpoints(tmp_path / "none", keep_last=1, world=alone).newest() is None


def test_one_that_was_being_written_is_passed_over_and_replaced(checkpoints, caplog):
    partial = checkpoints.folder / ".step-30.partial"
    shutil.copytree(checkpoints.folder / "step-10", partial)
    (partial / "complete.json").unlink()
    (partial / "weights" / "leftover.safetensors").touch()
    assert checkpoints.newest() == 20
    assert ".step-30.partial: passed over, its saving was interrupted" in caplog.messages[0]
    Constant().save(checkpoints, 30)
    assert loaded(checkpoints, checkpoints.newest()) == 30
    assert not partial.exists()


def test_a_whole_one_that_only_lacks_its_name_gets_it(checkpoints, alone):
    (checkpoints.folder / "step-20").rename(checkpoints.folder / ".step-20.partial")
    assert loaded(checkpoints, Checkpoints(checkpoints.folder, keep_last=3, world=alone).newest()) == 20


def test_the_format_of_a_later_version_is_refused(checkpoints, monkeypatch):
    monkeypatch.setattr("polarlm.checkpoint.store.FORMAT", 0)
    with pytest.raises(UserError, match=r"later PolarLM \(format 1\)"):
        loaded(checkpoints, 20)


def test_killed_at_any_moment_nothing_saved_is_lost(alone, tmp_path):
    """B29 and B30: twenty times, where each save deletes the one before."""
    fork = multiprocessing.get_context("fork")
    # Without locks: one that a killed process held would never be given back.
    last, count = fork.RawValue("q", 0), fork.RawValue("q", 0)
    folder = tmp_path / "checkpoints"

    def live(first, in_background):
        torch.set_num_threads(1)
        checkpoints = Checkpoints(folder, 1, alone, in_background)
        model = Constant()
        for step in range(first, first + 10**6):
            model.save(checkpoints, step)
            for completed in checkpoints.completed():
                last.value = completed
                count.value += 1

    chance = random.Random(0)
    for number in range(20):
        count.value = 0
        # Each life first saves again the step that it starts from.
        life = fork.Process(target=live, args=(last.value or 1, number % 2 == 1))
        life.start()
        saves = chance.randrange(3)
        while life.is_alive() and count.value < saves:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.02))
        life.kill()
        life.join()
        assert life.exitcode == -signal.SIGKILL
        checkpoints = Checkpoints(folder, keep_last=1, world=alone)
        newest = checkpoints.newest() or 0
        assert newest >= last.value
        assert newest == 0 or loaded(checkpoints, newest) == newest
        last.value = newest
    assert last.value > 1


@pytest.mark.parametrize("renamed_before", range(4))
def test_a_save_again_that_breaks_off_at_any_rename_leaves_a_complete_one(
    renamed_before, checkpoints, alone, monkeypatch
):
    renames = []

    def break_off(rename):
        def wrapped(*paths):
            if len(renames) == renamed_before:
                raise KeyboardInterrupt
            renames.append(paths)
            rename(*paths)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(os, name, break_off(getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            Constant().save(Checkpoints(checkpoints.folder, keep_last=1, world=alone), 20)
    assert loaded(checkpoints, Checkpoints(checkpoints.folder, keep_last=1, world=alone).newest()) == 20


def _save_with_a_limit(world, folder, in_background):
    """Save step 1; then step 2, where no file may grow beyond 2 KB, which the system tells like a full disk."""
    checkpoints = Checkpoints(folder, 3, world, in_background)
    Constant().save(checkpoints, 1)
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def fail():
        Constant().save(checkpoints, 2)
        while in_background and not checkpoints.failed:
            time.sleep(0.01)
        checkpoints.wait()

    with pytest.raises(UserError) as refusal:
        fail()
    world.barrier()
    return str(refusal.value), checkpoints.newest(), checkpoints.completed()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, ranks, in_background):
    for said, newest, completed in run_ranks(ranks, _save_with_a_limit, tmp_path, in_background):
        assert (
            said
            == f"{tmp_path}: step 2 cannot be saved (File too large); mend that, and go on with --resume from step 1"
        )
        assert newest == 1
        assert completed == [1]
    assert not list(tmp_path.glob(".*"))
