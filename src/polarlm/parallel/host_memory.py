"""What full recomputation keeps of a block, its input, in the host's memory between forward and backward.

An input leaves while its block computes, and comes back while the block behind it is computed again, so that a device
holds two at a time and not one a block (arXiv 2506.13996; torchtune does so with all that a block keeps). All copies
run one after another on a stream of their own, so that a buffer is never written before what is in it was read.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from polarlm.config import TrainConfig
from polarlm.parallel.device import Device
from polarlm.parallel.recompute import recomputes


def keep_inputs_on_host(blocks: Mapping[str, nn.Module], train: TrainConfig, device: Device) -> None:
    """Let every block that recomputes keep its input there, in place; modules and parameters keep their names.

    Args:
        blocks: by their number in the whole model; compiled ones have been.
    """
    memory = HostMemory(device)
    for number, block in blocks.items():
        if recomputes(number, train):
            # Around what is compiled: the compiler would not take the hooks along.
            call = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
            setattr(block, call, _keeping_input(getattr(block, call), int(number), memory))


def _keeping_input(call: Callable, number: int, memory: "HostMemory") -> Callable:
    def keeping_input(hidden: Tensor, *others: Any) -> Tensor:
        shape = hidden.shape  # the hooks live as long as what they pack, and must not hold the input itself

        def pack(saved: Tensor) -> "Kept | Tensor":
            # Other tensors, such as document ids, are the same ones for every block.
            return memory.keep(saved, number) if saved.shape == shape and saved.is_floating_point() else saved

        with saved_tensors_hooks(pack, memory.unpack):
            return call(hidden, *others)

    return keeping_input


class HostMemory:
    """Room for tensors of a device's: buffers that are taken once and used again for the whole run."""

    def __init__(self, device: Device) -> None:
        self._device, self._streams = device.torch, device.streams
        self._stream = self._streams.Stream()
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        self._newest: weakref.ref[Kept] | None = None

    def keep(self, tensor: Tensor, number: int) -> "Kept":
        """Begin to copy a tensor out; this object lets go of it when the next one is kept.

        Args:
            number: of the block, which rises in a forward pass.
        """
        newest = self._newest() if self._newest else None
        if newest is not None:
            self._let_go(newest)
        before = self._newest if newest is not None and newest.number < number else None
        kept = Kept(self, number, self._room_for(tensor), before)
        self._newest = weakref.ref(kept)
        self._move(kept, tensor.detach(), to_host=True)
        return kept

    def unpack(self, saved: "Kept | Tensor") -> Tensor:
        """A kept tensor on its device; others as they are.

        The one before it begins to come back too, since most likely it is next: a hint, which need not come true.
        """
        if isinstance(saved, Tensor):
            return saved
        if saved.near is None:
            self._bring(saved)
        tensor = saved.near
        self._let_go(saved)
        before = saved.before() if saved.before else None
        if before is not None and before.near is None:
            self._bring(before)
        return tensor

    def take_back(self, kept: "Kept") -> None:
        """Its buffer may be written again."""
        self._let_go(kept)
        self._free[kept.buffer.shape, kept.buffer.dtype].append(kept.buffer)

    def _room_for(self, tensor: Tensor) -> Tensor:
        free = self._free[tensor.shape, tensor.dtype]
        # A device copies to and from pinned memory while its host does something else.
        pinned = self._device.type != "cpu"
        return free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)

    def _bring(self, kept: "Kept") -> None:
        self._move(kept, torch.empty_like(kept.buffer, device=self._device), to_host=False)

    def _move(self, kept: "Kept", near: Tensor, *, to_host: bool) -> None:
        target, source = (kept.buffer, near) if to_host else (near, kept.buffer)
        # It may still write `near`, or read what was there before.
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            target.copy_(source, non_blocking=True)
        kept.near, kept.moved = near, self._stream.record_event()

    def _let_go(self, kept: "Kept") -> None:
        """Drop what is on the device; work from here on comes after the copy, so it may use that memory again."""
        if kept.near is not None:
            self._streams.current_stream().wait_event(kept.moved)
            kept.near = kept.moved = None


@dataclass(eq=False)
class Kept:
    """A tensor in the host's memory, for as long as this lives.

    Attributes:
        before: the one of the same pass that was kept before it, which may be gone.
        near: the tensor on its device, on its way out or back; `moved` is the event of its arrival.
    """

    memory: HostMemory
    number: int
    buffer: Tensor
    before: "weakref.ref[Kept] | None"
    near: Tensor | None = None
    moved: Any = None

    def __del__(self) -> None:
        self.memory.take_back(self)
