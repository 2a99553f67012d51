"""Which device a rank takes, from what it can see; the accelerators are stand-ins."""

import pytest
import torch

from polarlm.config import UserError
from polarlm.parallel import local_device


@pytest.fixture
def visible(monkeypatch):
    """Let a process see that many accelerators; gives the list of those that were made the current one."""
    taken = []

    def show(count):
        kind = torch.device("cuda") if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: kind)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
        return taken

    return show


def test_without_accelerators_it_is_the_cpu(visible):
    visible(0)
    assert local_device(3).torch == torch.device("cpu")


@pytest.mark.parametrize(("count", "rank", "number"), [(4, 0, 0), (4, 3, 3), (1, 0, 0), (1, 3, 0), (12, 11, 11)])
def test_a_rank_takes_the_device_of_its_number_or_the_only_one(count, rank, number, visible):
    taken = visible(count)
    assert local_device(rank).torch == torch.device("cuda", number)
    assert taken == [number]


def test_a_rank_without_a_device_of_its_own_says_so(visible):
    taken = visible(2)
    with pytest.raises(UserError, match="rank 2 of this host sees 2 devices"):
        local_device(2)
    assert taken == []
