"""Named tensors in a folder of safetensors shards: written by all ranks together, read under any other layout.

Each rank writes one shard with the parts that it holds; what several ranks hold alike is written by one of them. So a
replicated model gives whole tensors, and a model sharded over n ranks n pieces of each, all under the tensor's plain
name; a shard's header says at which index of the tensor each piece begins (`DCP_SHARDING_INFO`).
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from polarlm.checkpoint.headers import read_headers, whole_shape


@dataclass(frozen=True)
class Stored:
    """A whole tensor as a folder's shards hold it."""

    shape: torch.Size
    dtype: torch.dtype


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors, DTensors among them, into `folder`, which is made; every rank calls.

    When it returns on the first rank, every rank's shard is written.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _one_process_is_no_mistake():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def read_tensors(tensors: Mapping[str, Tensor], folder: Path, alone: bool = False) -> None:
    """Fill each of the tensors in place with what `folder` holds under its name; every rank calls, or one `alone`."""
    reader = HuggingFaceStorageReader(str(folder))
    with _one_process_is_no_mistake():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=alone or not dist.is_initialized())


def list_tensors(folder: Path) -> dict[str, Stored]:
    """What the shards in `folder` hold, from their headers alone.

    Raises:
        UserError: a header is damaged, or is not borne out by its file and the other shards.
    """
    return {
        name: Stored(torch.Size(whole_shape(pieces)), pieces[0].dtype) for name, pieces in read_headers(folder).items()
    }


@contextmanager
def _one_process_is_no_mistake() -> Iterator[None]:
    """Silence the warning that torch gives to one process even when told that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
