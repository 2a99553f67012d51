"""What is to be saved, copied into the host's memory, so that training can go on while it is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from polarlm.checkpoint.tensors import local_part


class Staging:
    """Host memory for one rank's parts of some tensors: made at the first copy, and used again by each later one."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._everything: dict[str, torch.Size] = {}
        self._written: frozenset[str] = frozenset()

    def share_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that this rank wrote the last time, while they are still the same; else all.

        What several ranks hold alike is written by one of them, so the others need no copy of it.
        """
        everything = {name: tensor.shape for name, tensor in tensors.items()}
        if everything != self._everything:
            self._everything, self._written = everything, frozenset(everything)
        return {name: tensor for name, tensor in tensors.items() if name in self._written}

    def wrote(self, names: frozenset[str]) -> None:
        """Remember what of the last share it fell to this rank to write; the others' memory is given back."""
        self._written = names
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in names}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of the tensors, in the host's memory; the next call overwrites them."""
        for name, tensor in tensors.items():
            part = local_part(tensor)
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (part.shape, part.dtype):
                # The device can write into pinned memory while its host does something else.
                buffer = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(part, non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return {name: self._buffers[name] for name in tensors}
