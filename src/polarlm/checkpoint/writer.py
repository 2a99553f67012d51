"""Safetensors shards as torch.distributed.checkpoint's planner shares them out, streamed to the disk.

PyTorch's own writer of this format serialises a whole shard in memory first; this one sends each tensor's bytes to the
file as they lie, and takes their digest meanwhile. The files are the same: pieces of tensors under the tensors' names,
and in the header at which index of its tensor each begins (`DCP_SHARDING_INFO`), as PyTorch's reader wants it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from polarlm.checkpoint.headers import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 16 << 20  # bytes that go to the disk and into the digest side by side


@dataclass(frozen=True)
class WrittenFile:
    """A file that has reached the disk."""

    name: str
    bytes: int
    sha256: str


class ShardWriter(StorageWriter):
    """Writes each rank's share of the tensors into one shard of a folder.

    Attributes:
        names: of the tensors this rank has written a piece of.
        files: on the coordinator, every rank's shard.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: frozenset[str] = frozenset()
        self.files: list[WrittenFile] = []

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Called before a save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on every rank before it plans."""
        self._folder.mkdir(exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """What a rank could write, as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank the name of its shard."""
        return [replace(plan, storage_data=f"shard-{number:05}.safetensors") for number, plan in enumerate(plans, 1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what falls to this rank, and wait until the disk has it."""
        written: Future[list[WriteResult]] = Future()
        self.names = frozenset(item.index.fqn for item in plan.items)
        if not plan.items:
            written.set_result([])
            return written
        # The widest first: then each lies at a multiple of its width, and can be mapped into memory.
        items = sorted(plan.items, key=lambda item: (-_properties(item).itemsize, item.index.fqn))
        file = _write_shard(self._folder / plan.storage_data, items, planner)
        written.set_result([WriteResult(item.index, file.bytes, file) for item in items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the coordinator with what every rank has written."""
        self.files = [shard[0].storage_data for shard in results if shard]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Any folder will do."""
        return True


class FromElsewhere(DefaultSavePlanner):
    """Plans with the tensors it is given, of which shapes and placement count, and takes their bytes from others."""

    def __init__(self, local_parts: Mapping[str, Tensor]) -> None:
        """
        Args:
            local_parts: by name what this rank holds of each tensor.
        """
        super().__init__()
        self._local_parts = local_parts

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """This rank's part of a tensor."""
        return self._local_parts[write_item.index.fqn]


def _properties(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None, "only tensors are saved this way"
    return item.tensor_data.properties.dtype


def _write_shard(path: Path, items: Iterable[WriteItem], planner: SavePlanner) -> WrittenFile:
    digest = hashlib.sha256()
    # Digest and disk each take their time without Python's lock.
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        for piece in (_header(items), *(_bytes_of(planner.resolve_data(item)) for item in items)):
            for start in range(0, len(piece), _CHUNK):
                chunk = piece[start : start + _CHUNK]
                beside.submit(digest.update, chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return WrittenFile(path.name, size, digest.hexdigest())


def _header(items: Iterable[WriteItem]) -> memoryview:
    tensors: dict[str, Any] = {}
    begins: dict[str, Any] = {}
    end = 0
    for item in items:
        name, chunk, dtype = item.index.fqn, item.tensor_data.chunk, _properties(item)
        begin, end = end, end + chunk.sizes.numel() * dtype.itemsize
        tensors[name] = {"dtype": _NAMES[dtype], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
        begins[name] = {"saved_offsets": list(chunk.offsets)}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(begins)}
    text = json.dumps({"__metadata__": about} | tensors).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it lies in the host's memory in one piece."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
