"""Which checkpoints stay: the newest complete ones, always the one just written, and what this run did not write."""

import pytest
import torch
from torch import nn

from polarlm.checkpoint import Checkpoints


@pytest.fixture
def save(alone, tmp_path):
    """Saves a step, keeping the last so many, and tells which folders are there then."""

    def save(step, keep_last):
        model = nn.Linear(2, 2)
        Checkpoints(tmp_path, keep_last, alone).save(step, model, torch.optim.SGD(model.parameters(), lr=1.0), {})
        return {path.name for path in tmp_path.iterdir()}

    return save


def test_the_newest_stay(save):
    assert [save(step, keep_last=2) for step in (9, 10, 100)] == [
        {"step-9", "latest"},
        {"step-9", "step-10", "latest"},
        {"step-10", "step-100", "latest"},
    ]


def test_keeping_one_keeps_the_one_just_written(save, tmp_path):
    """B30."""
    for step in (10, 20, 30):
        assert save(step, keep_last=1) == {f"step-{step}", "latest"}
        assert (tmp_path / "latest").readlink().name == f"step-{step}"


def test_a_higher_step_from_elsewhere_costs_nothing_its_place(save):
    """B30."""
    save(1000, keep_last=1)
    assert save(10, keep_last=1) == {"step-1000", "step-10", "latest"}
    assert save(20, keep_last=1) == {"step-1000", "step-20", "latest"}


def test_damaged_ones_do_not_count(save, tmp_path):
    for step in (10, 20, 30):
        save(step, keep_last=3)
    (tmp_path / "step-30" / "complete.json").unlink()
    assert save(40, keep_last=2) == {"step-20", "step-30", "step-40", "latest"}


def test_nothing_is_deleted_before_the_new_one_is_complete(save, tmp_path, monkeypatch):
    save(10, keep_last=1)

    def fail(folder, digests):
        raise OSError("no space left on device")

    monkeypatch.setattr("polarlm.checkpoint.store.mark_complete", fail)
    with pytest.raises(OSError, match="no space"):
        save(20, keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-10", ".step-20.partial", "latest"}


@pytest.mark.parametrize("where", ["keep_newest", "delete", "_set_aside"])
def test_killed_between_write_and_delete_the_new_one_is_there(save, alone, tmp_path, monkeypatch, where):
    """B30."""
    save(10, keep_last=1)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"polarlm.checkpoint.folders.{where}", die)
        with pytest.raises(KeyboardInterrupt):
            save(20, keep_last=1)
    assert Checkpoints(tmp_path, 1, alone).newest() == 20
    assert save(30, keep_last=1) == {"step-30", "latest"}


def test_what_was_left_half_written_or_half_deleted_goes(save, tmp_path):
    (tmp_path / ".step-3.partial" / "weights").mkdir(parents=True)
    (tmp_path / ".step-2.discarded" / "weights").mkdir(parents=True)
    assert save(10, keep_last=1) == {"step-10", "latest"}
