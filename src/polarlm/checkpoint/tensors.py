"""Named tensors in a folder of safetensors shards: written by all ranks together, read under any other layout.

Each rank writes one shard with the parts that it holds; what several ranks hold alike is written by one of them. So a
replicated model gives whole tensors, and a model sharded over n ranks n pieces of each, all under the tensor's plain
name; a shard's header says at which index of the tensor each piece begins (`DCP_SHARDING_INFO`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from polarlm.checkpoint.headers import read_headers, whole_shape
from polarlm.checkpoint.writer import FromElsewhere, ShardWriter

# Given by torch to one process even when told that it is one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


@dataclass(frozen=True)
class Stored:
    """A whole tensor as a folder's shards hold it."""

    shape: torch.Size
    dtype: torch.dtype


def write_tensors(
    tensors: Mapping[str, Tensor],
    local_parts: Mapping[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup | None = None,
) -> ShardWriter:
    """Write the tensors, DTensors among them, into `folder`, which is made; every rank of the group calls.

    When it returns, every rank's shard is on the disk.

    Args:
        tensors: their shapes and placements.
        local_parts: this rank's bytes of each, as `local_part` gives them, or a copy made of them earlier.
        group: the ranks that save together; by default all.

    Returns:
        The writer, which knows what this rank has written and, on the first, every rank's file.
    """
    writer = ShardWriter(folder)
    dcp.save(
        dict(tensors),
        storage_writer=writer,
        planner=FromElsewhere(local_parts),
        process_group=group,
        no_dist=not dist.is_initialized(),
    )
    return writer


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, alone: bool = False) -> None:
    """Fill each of the tensors in place with what `folder` holds under its name; every rank calls, or one `alone`."""
    reader = HuggingFaceStorageReader(str(folder))
    dcp.load(dict(tensors), storage_reader=reader, no_dist=alone or not dist.is_initialized())


def list_tensors(folder: Path) -> dict[str, Stored]:
    """What the shards in `folder` hold, from their headers alone.

    Raises:
        UserError: a header is damaged, or is not borne out by its file and the other shards.
    """
    return {
        name: Stored(torch.Size(whole_shape(pieces)), pieces[0].dtype) for name, pieces in read_headers(folder).items()
    }
