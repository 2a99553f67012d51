"""What a rank really holds: the bytes of every storage, while it lives."""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Follows every storage that an operation makes inside; gloo's own buffers are not seen.

    Attributes:
        peak: most bytes that lived at once; may be set to 0 to begin anew.
    """

    def __init__(self):
        super().__init__()
        self._storages = {}
        self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # so that it is taken apart into operations on local tensors, which come here
        output = operation(*args, **(kwargs or {}))
        storages = [tensor.untyped_storage() for tensor in tree_leaves(output) if _is_real(tensor)]
        new = {storage._cdata: weakref.ref(storage) for storage in storages if not self._knows(storage)}
        self._storages |= new
        if new or output is None:  # what returns nothing may fill a storage that was made larger
            self.peak = max(self.peak, self.bytes_alive())
        return output

    def _knows(self, storage):
        reference = self._storages.get(storage._cdata)
        return reference is not None and reference() is not None

    def bytes_alive(self):
        """Bytes that live now; a storage may have been made larger, or emptied, since it was made."""
        alive = {key: storage for key, reference in self._storages.items() if (storage := reference()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def _is_real(tensor):
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta
