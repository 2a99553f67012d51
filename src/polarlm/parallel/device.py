"""The device a rank computes on: which one, its backend, its memory. Nothing else asks torch for these."""

import ctypes
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polarlm.config import UserError

_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "cpu": "gloo"}

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt(3)
_LARGE_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True)
class Device:
    """One rank's device."""

    torch: torch.device

    @property
    def backend(self) -> str:
        """The process-group backend for tensors of this device."""
        return _BACKENDS[self.torch.type]

    @property
    def name(self) -> str:
        """What the device calls itself, such as `NVIDIA A100-SXM4-40GB`; `cpu` on a CPU."""
        return "cpu" if self.torch.type == "cpu" else self._module.get_device_name(self.torch)

    @property
    def streams(self) -> Any:
        """Torch's module with this device's `Stream`, `stream`, `current_stream`; on a CPU they do nothing."""
        return self._module

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.torch.type != "cpu":
            self._module.synchronize(self.torch)

    def peak_memory_bytes(self) -> int:
        """Most memory held so far: allocated on an accelerator, resident in this process on a CPU."""
        if self.torch.type != "cpu":
            return self._module.max_memory_allocated(self.torch)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def return_freed_memory(self) -> None:
        """From here on, give large blocks back to the system when they are freed, where the C library keeps them.

        Glibc hands out blocks of up to 32 MiB of one heap, and what is freed in its midst it keeps: a long step's
        tensors, of many sizes, leave holes that add up to more than what lives. Blocks of their own cost fresh pages.
        """
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if self.torch.type == "cpu" else None
        if mallopt is not None:  # other C libraries have none, and no such heap
            mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)

    def record_memory(self) -> None:
        """Remember every allocation from here on, where the device can; `write_memory` ends it."""
        if memory := self._memory_recorder:
            memory._record_memory_history()

    def write_memory(self, path: Path) -> None:
        """Write what was recorded for torch's memory viewer, and stop recording; nothing where the device cannot."""
        if memory := self._memory_recorder:
            memory._dump_snapshot(str(path))
            memory._record_memory_history(enabled=None)

    @property
    def _memory_recorder(self):
        memory = None if self.torch.type == "cpu" else getattr(self._module, "memory", None)
        return memory if hasattr(memory, "_record_memory_history") else None

    @property
    def _module(self):
        return getattr(torch, self.torch.type)


def local_device(local_rank: int) -> Device:
    """The device of this machine's rank number `local_rank`: the accelerator of that number, else the CPU.

    Raises:
        UserError: this rank sees several accelerators, and none of its number.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Device(torch.device("cpu"))
    visible = torch.accelerator.device_count()
    if 1 < visible <= local_rank:
        raise UserError(
            f"parallel.ranks: rank {local_rank} of this host sees {visible} devices, so none is its own; "
            f"start at most {visible} ranks on a host"
        )
    # A launcher may show each rank only its own device, which is then number 0.
    device = torch.device(accelerator.type, local_rank if visible > 1 else 0)
    torch.accelerator.set_device_index(device.index)
    return Device(device)
