"""Which device a rank takes, from what it can see; the accelerators are stand-ins."""

import platform
import subprocess
import sys

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


# Of a fresh process, whose heap nobody else has used.
LEFT_OVER = """
import sys, torch
from pathlib import Path
from polarlm.parallel import Device

def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

def ones(mebibytes):
    return torch.ones(int(mebibytes * 2**20), dtype=torch.uint8)

if sys.argv[1] == "returns":
    Device(torch.device("cpu")).return_freed_memory()
ones(24)  # once such a block was freed, glibc takes the next ones from its heap
before = resident()
pairs = [(ones(4), ones(0.25)) for _ in range(32)]
small = [small for _, small in pairs]
del pairs
print(resident() - before - 32 * 0.25)
"""


def _left_over(way):
    """MiB that stay resident when 128 are let go, between whose blocks are small ones that live on."""
    return float(subprocess.run([sys.executable, "-c", LEFT_OVER, way], capture_output=True, check=True).stdout)


def test_a_cpu_gives_freed_memory_back_when_told_to():
    assert _left_over("returns") < 8
    if platform.libc_ver()[0] == "glibc":  # else the line above would prove nothing
        assert _left_over("keeps") > 64
