"""From samples to this rank's microbatches, read ahead of the training step."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.config import DataConfig, UserError
from polarlm.data.indexed import IndexedDataset
from polarlm.data.samples import Samples, SyntheticSamples, split_documents

IGNORED = -100  # the target of a position that is not trained
_PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Batch:
    """B samples of S tokens."""

    tokens: np.ndarray  # int64 [B, S]
    targets: np.ndarray  # int64 [B, S], the next token; -100 is not trained on
    positions: np.ndarray  # int64 [B, S], place in the sample, or in the document where documents are masked
    document_ids: np.ndarray | None  # int32 [B, S]; None where tokens see across documents


def batch_of(samples: Samples | SyntheticSamples, ids: Sequence[int], mask_documents: bool = False) -> Batch:
    """The samples of these ids as a batch."""
    rows = np.stack([samples.tokens_of(sample) for sample in ids])
    positions = np.broadcast_to(np.arange(samples.seq_len), (len(ids), samples.seq_len)).copy()
    document_ids = None
    if mask_documents:
        document_ids = np.stack([samples.document_ids(sample) for sample in ids])
        starts = np.diff(document_ids, axis=1, prepend=-1) != 0
        positions -= np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
    return Batch(rows[:, :-1], rows[:, 1:], positions, document_ids)


class Loader:
    """This data-parallel rank's microbatches of one global batch after the other, without end.

    Step k's global batch is the positions [consumed, consumed + G) of the samples' order, and rank r of n takes the r-th
    of n contiguous parts: the same global batches for any number of ranks. The number of consumed samples is the whole
    state. A thread reads up to `prefetch` steps ahead; an error in it is raised where the batch would have come.
    """

    def __init__(
        self,
        samples: Samples | SyntheticSamples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        start_sample: int,
        mask_documents: bool = False,
        prefetch: int = 2,
    ) -> None:
        self._samples, self._mask_documents = samples, mask_documents
        self._global, self._micro = global_batch_size, micro_batch_size
        self._share = global_batch_size // ranks
        self._next = start_sample + rank * self._share
        self._ready: queue.Queue[list[Batch] | Exception] = queue.Queue(prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="loader", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        got = self._ready.get()
        if isinstance(got, Exception):
            raise got
        return got

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # it may be waiting for room
            except queue.Empty:
                continue

    def _read_ahead(self) -> None:
        try:
            while not self._closed.is_set():
                self._ready.put(self._read_step())
        except Exception as error:  # whatever it is, the training thread must hear of it
            self._ready.put(error)

    def _read_step(self) -> list[Batch]:
        positions = range(self._next, self._next + self._share)
        self._next += self._global
        ids = [self._samples.id_at(position) for position in positions]
        micro = (ids[start : start + self._micro] for start in range(0, self._share, self._micro))
        return [batch_of(self._samples, some, self._mask_documents) for some in micro]


def open_split(
    data: DataConfig, seq_len: int, seed: int, which: str = "train", vocab_size: int | None = None
) -> Samples | SyntheticSamples:
    """The samples of one part of a run's data; only the training part is shuffled.

    Args:
        which: `train`, `validation` or `test`.
        vocab_size: the model's; needed for synthetic data, and checked against what the data holds.

    Raises:
        UserError: the data cannot be read, has ids beyond the model's, or has no sample in that part.
    """
    if data.paths == ["synthetic"]:
        assert vocab_size is not None
        return SyntheticSamples(vocab_size, seq_len, seed if which == "train" else seed + 1)
    if len(data.paths) > 1:
        raise UserError("data.paths: blends of several datasets are not available yet; give one")
    dataset = IndexedDataset(data.paths[0])
    needed = (dataset.manifest or {}).get("tokenizer", {}).get("vocab_size", 0)
    if vocab_size is not None and needed > vocab_size:
        raise UserError(f"model.vocab_size: {vocab_size} is less than the {needed} ids of {dataset.prefix}")
    documents = split_documents(dataset.documents, data.split)[_PARTS.index(which)]
    return Samples(dataset, documents, seq_len, seed, shuffle=which == "train")


def tokenizer_of(data: DataConfig) -> str:
    """The tokenizer a run uses where `data.tokenizer` is not given: the one its data was prepared with, else `bytes`."""
    if data.paths == ["synthetic"]:
        return "bytes"
    manifest = IndexedDataset(data.paths[0]).manifest or {}
    recorded = manifest.get("tokenizer", {}).get("path")
    if recorded is None:
        raise UserError(f"data.tokenizer: {data.paths[0]} does not say how it was prepared; name its tokenizer")
    return recorded
