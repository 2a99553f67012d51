"""From samples to this rank's microbatches, read ahead of the training step."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Literal, get_args

import numpy as np

from polarlm.config import DataConfig, UserError
from polarlm.data.blend import BlendedSamples, read_paths
from polarlm.data.documents import DocumentSamples
from polarlm.data.grouped import GroupedByLength
from polarlm.data.indexed import IndexedDataset
from polarlm.data.samples import Samples, SyntheticSamples, split_documents
from polarlm.data.shapes import AnySamples, StepShapes
from polarlm.data.tokenizer import Tokenizer

_Part = Literal["train", "validation", "test"]
_IGNORED = -100  # the model's word for a target that is not trained
_PARTS: tuple[_Part, ...] = get_args(_Part)


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens: samples, the parts that they are cut into, or documents, padded at their ends."""

    tokens: np.ndarray  # int64 [B, S]
    targets: np.ndarray  # int64 [B, S], the next token of each, or -100 where none is trained on
    positions: np.ndarray  # int64 [B, S], place in the sample, or in the document where documents are masked
    document_ids: np.ndarray | None  # int32 [B, S]; None where tokens see across documents
    sources: np.ndarray | None = None  # int64 [B], the number in a blend of the dataset each is of


def batch_of(
    samples: AnySamples, ids: Sequence[int], mask_documents: bool = False, seq_len: int | None = None
) -> Batch:
    """The samples of these ids as a batch.

    Args:
        seq_len: S, by default the samples' own. A longer sample becomes several sequences in its order, which know
            nothing of each other: the same tokens, each with the same target. What is shorter is padded at its end,
            where causal attention never looks and nothing is trained.
    """
    seq_len = seq_len or samples.seq_len
    rows = [samples.tokens_of(sample) for sample in ids]
    tokens = _in_sequences([row[:-1] for row in rows], seq_len, 0)
    targets = _in_sequences([row[1:] for row in rows], seq_len, _IGNORED)
    positions = np.broadcast_to(np.arange(seq_len), tokens.shape).copy()
    document_ids = None
    if mask_documents:
        document_ids = np.stack([samples.document_ids(sample) for sample in ids]).reshape(tokens.shape)
        document_ids -= document_ids[:, :1].copy()
        starts = np.diff(document_ids, axis=1, prepend=-1) != 0
        positions -= np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
    sources = np.repeat([samples.source_of(sample) for sample in ids], [_sequences(row[:-1], seq_len) for row in rows])
    return Batch(tokens, targets, positions, document_ids, sources)


def _in_sequences(samples: Sequence[np.ndarray], seq_len: int, padding: int) -> np.ndarray:
    """int64 [B, S]: each sample from a new sequence on."""
    filled = np.full(sum(_sequences(sample, seq_len) for sample in samples) * seq_len, padding)
    place = 0
    for sample in samples:
        filled[place : place + len(sample)] = sample
        place += _sequences(sample, seq_len) * seq_len
    return filled.reshape(-1, seq_len)


def _sequences(sample: np.ndarray, seq_len: int) -> int:
    return -(-len(sample) // seq_len)


class Loader:
    """This data-parallel rank's microbatches of one global batch after the other, without end.

    A step's global batch is positions [consumed, consumed + G) of the samples' order, and rank r of n takes the r-th of
    n contiguous parts of it: the same global batches for any number of ranks. The number of consumed samples is the
    whole state. `shapes` says how long each step's sequences are; without it samples stay whole. A thread reads up to
    `prefetch` steps ahead; an error in it is raised where its batches were due.
    """

    def __init__(
        self,
        samples: AnySamples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        start_sample: int,
        shapes: StepShapes | None = None,
        mask_documents: bool = False,
        prefetch: int = 2,
    ) -> None:
        assert global_batch_size % (ranks * micro_batch_size) == 0, "the configuration sees to whole microbatches"
        self._samples, self._shapes, self._mask_documents = samples, shapes, mask_documents
        self._share, self._micro, self._rank = global_batch_size // ranks, micro_batch_size, rank
        self._firsts = count(start_sample, global_batch_size)  # of each step's global batch
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: deque[Future[list[Batch]]] = deque()
        for _ in range(prefetch):
            self._read_one_more()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        self._read_one_more()
        return self._ahead.popleft().result()

    def close(self) -> None:
        """End the thread; what it read ahead is dropped."""
        self._reader.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _read_one_more(self) -> None:
        self._ahead.append(self._reader.submit(self._read_step, next(self._firsts)))

    def _read_step(self, first: int) -> list[Batch]:
        own = first + self._rank * self._share
        ids = [self._samples.id_at(position) for position in range(own, own + self._share)]
        micro = (ids[start : start + self._micro] for start in range(0, self._share, self._micro))
        seq_len = self._shapes.at(first).seq_len if self._shapes else None
        return [batch_of(self._samples, some, self._mask_documents, seq_len) for some in micro]


def open_split(
    data: DataConfig,
    seq_len: int,
    seed: int,
    which: _Part = "train",
    vocab_size: int | None = None,
    group: int | None = None,
) -> AnySamples:
    """The samples of one part of a run's data; only the training part is shuffled.

    Args:
        which: `train`, `validation` or `test`; each dataset of a blend is split in the same proportions.
        vocab_size: the model's; needed for synthetic data, and checked against what the data holds.
        group: samples of a global batch, where it is to hold documents of like length.

    Raises:
        UserError: the data cannot be read, has ids beyond the model's, or has no sample in that part.
    """
    if data.is_synthetic:
        assert vocab_size is not None, "random ids are drawn from a vocabulary"
        return SyntheticSamples(vocab_size, seq_len, seed if which == "train" else seed + 1)
    paths = read_paths(data)
    parts = [_open_part(path.prefix, data, seq_len, seed, which, vocab_size) for path in paths]
    if len(parts) == 1:
        samples = parts[0]
    else:
        # Without weights each has its share of the samples: in a stream, where they are of one length, of the tokens.
        sizes = (part.tokens if data.samples == "stream" else part.count() for part in parts)
        samples = BlendedSamples(
            parts, [path.weight or Fraction(size) for path, size in zip(paths, sizes, strict=True)]
        )
    return GroupedByLength(samples, group, seed) if group else samples


def _open_part(
    prefix: str, data: DataConfig, seq_len: int, seed: int, which: _Part, vocab_size: int | None
) -> Samples | DocumentSamples:
    dataset = IndexedDataset(prefix)
    needed = (dataset.manifest or {}).get("tokenizer", {}).get("vocab_size", 0)
    if vocab_size is not None and needed > vocab_size:
        raise UserError(
            f"model.vocab_size: {vocab_size} is less than the {needed} ids that {dataset.prefix} was prepared with; "
            f"leave it out, or make it {needed}"
        )
    start, stop = split_documents(dataset.documents, data.split)[_PARTS.index(which)]
    kind = Samples if data.samples == "stream" else DocumentSamples
    samples = kind(dataset, (start, stop), seq_len, seed, shuffle=which == "train", vocab_size=vocab_size)
    if not samples.count():
        takes, mend = f"train.seq_len + 1 = {seq_len + 1}", ", or lower train.seq_len"
        if data.samples == "documents":
            takes, mend = "a document of two", ""
        raise UserError(
            f"data.split: {data.split} leaves {which} {stop - start} of the {dataset.documents} documents of "
            f"{dataset.prefix}, {samples.tokens} tokens, and one sample takes {takes}; "
            f"give {which} a larger share{mend}"
        )
    return samples


def check_tokenizer(data: DataConfig, tokenizer: Tokenizer, named: str) -> None:
    """Refuse a tokenizer, `named` so, that is another than a dataset's manifest says it was prepared with.

    Raises:
        UserError: names the two.
    """
    for path in [] if data.is_synthetic else read_paths(data):
        recorded = (IndexedDataset(path.prefix).manifest or {}).get("tokenizer", {}).get("digest")
        if recorded not in (None, tokenizer.digest):
            raise UserError(
                f"data.tokenizer: {named} is another than {path.prefix} was prepared with (digest {tokenizer.digest}, "
                f"not {recorded}); bring that one back, or prepare the data again"
            )


def tokenizer_of(data: DataConfig) -> str:
    """The tokenizer of a run that names none: the one its data was prepared with, or `bytes` for synthetic data.

    Raises:
        UserError: the data does not say, or its datasets say different ones.
    """
    if data.is_synthetic:
        return "bytes"
    recorded = {
        path.prefix: (IndexedDataset(path.prefix).manifest or {}).get("tokenizer", {}) for path in read_paths(data)
    }
    for prefix, tokenizer in recorded.items():
        if tokenizer.get("path") is None:
            raise UserError(f"data.tokenizer: {prefix} does not say how it was prepared; name its tokenizer")
    if len({tokenizer.get("digest") for tokenizer in recorded.values()}) > 1:
        raise UserError(
            f"data.paths: {', '.join(recorded)} were prepared with different tokenizers; prepare them alike"
        )
    return next(iter(recorded.values()))["path"]
