"""The ranks of a run: how they meet, and the few things they say to each other outside the model."""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from polarlm.parallel.device import Device, local_device

_PATIENCE = timedelta(hours=6)  # for a thread that waits while other ranks write to a slow disk


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    device: Device
    group: dist.ProcessGroup | None = None  # by default all ranks' own

    def apart(self) -> "World":
        """The same ranks with a group of their own over the host's memory, for a second thread: what it says there
        never mixes with what the first says here. Every rank calls."""
        group = dist.new_group(backend="gloo", timeout=_PATIENCE) if self.size > 1 else None
        return replace(self, device=Device(torch.device("cpu")), group=group)

    @property
    def is_first(self) -> bool:
        """True on the one rank that speaks for all."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The sum over the ranks of each of `values`, on every rank, in float64 and in one exchange."""
        if self.size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device.torch)
        dist.all_reduce(totals, group=self.group)
        return totals.tolist()

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(self.group)

    def gather(self, value: object) -> list[object]:
        """Every rank's `value`, in the order of the ranks, on every rank; a small picklable thing."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, value: object) -> object:
        """The first rank's `value`, on every rank; a small picklable thing."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


@contextmanager
def join_world(
    rank: int,
    size: int,
    local_rank: int,
    master_addr: str,
    master_port: int,
    listen_fd: int | None = None,
    device: Device | None = None,
) -> Iterator[World]:
    """Meet the other ranks, and part from them at the end.

    Args:
        rank, size, local_rank: this process's place, as its launcher numbered it.
        master_addr, master_port: where rank 0 listens.
        listen_fd: rank 0's already listening socket, when its launcher opened one so that no other run can take
            the port in between.
        device: by default this rank's own accelerator, or the CPU where there is none.
    """
    device = device or local_device(local_rank)
    if size == 1:
        yield World(0, 1, device)
        return
    listening = {"master_listen_fd": listen_fd} if rank == 0 and listen_fd is not None else {}
    store = dist.TCPStore(
        master_addr, master_port, size, is_master=rank == 0, timeout=timedelta(minutes=10), **listening
    )
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size)
    failed = True
    try:
        yield World(rank, size, device)
        failed = False
    finally:
        # A rank that fails must not wait for the others in a tear-down; a tear-down never fails a run that succeeded.
        if not failed:
            _leave()


def _leave() -> None:
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        print(f"warning: the process group did not close cleanly: {error}", file=sys.stderr)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Do a rank's work as the last of this process, and exit with what it gives, or 1 and a traceback.

    The interpreter's tear-down is left out: torch's threads do not always live through it where a group is still open,
    as it is in a rank that fails, and the process then ends with SIGABRT whatever its code was.
    """
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
