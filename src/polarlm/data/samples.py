"""Training samples by arithmetic: no index of samples is ever built, on disk or in memory.

A split is a range of documents, and so a range of T tokens of the stream. Repeated without end, it is cut into samples:
sample i reads the s + 1 tokens from i·s on, so that neighbours share one. Epoch e holds the samples whose first token
lies in it, ids ⌈eT/s⌉ .. ⌈(e+1)T/s⌉ - 1, and visits them in a permutation of its own.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from polarlm.config import UserError
from polarlm.data.indexed import IndexedDataset


class Samples:
    """The samples of a split in their global order, which depends on (seed, data) and nothing else."""

    def __init__(
        self, dataset: IndexedDataset, documents: tuple[int, int], seq_len: int, seed: int, shuffle: bool = True
    ) -> None:
        """
        Args:
            documents: first document and the one after the last.
            seq_len: s, the tokens a sample trains on.
            shuffle: without it, position and id are the same.

        Raises:
            UserError: the range is too short for one sample.
        """
        self.seq_len = seq_len
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._first_document, self._stop_document = documents
        self._start = dataset.document_start(documents[0])
        self.tokens = dataset.document_start(documents[1]) - self._start
        if self.count() < 1:
            raise UserError(
                f"data.split: a part of {dataset.prefix} has {documents[1] - documents[0]} documents with "
                f"{self.tokens} tokens, too few for one sample of train.seq_len {seq_len} + 1; "
                "give that part more, or shorten train.seq_len"
            )

    def count(self, epochs: int = 1) -> int:
        """Whole samples in that many epochs: ⌊(E·T - 1) / s⌋."""
        return (epochs * self.tokens - 1) // self.seq_len

    def id_at(self, position: int) -> int:
        """The sample at a position of the global order; every id stands at one position, epoch after epoch."""
        if not self._shuffle:
            return position
        epoch = position * self.seq_len // self.tokens
        first, stop = self._first_id(epoch), self._first_id(epoch + 1)
        return first + permute(position - first, stop - first, f"{self._seed}:{epoch}")

    def tokens_of(self, sample: int) -> np.ndarray:
        """int64 [s + 1]: the sample's inputs and, one later, its targets."""
        start, count = sample * self.seq_len % self.tokens, self.seq_len + 1
        parts = []
        while count:
            part = self._dataset.read(self._start + start, min(count, self.tokens - start))
            parts.append(part)
            count, start = count - len(part), 0
        return np.concatenate(parts).astype(np.int64)

    def document_ids(self, sample: int) -> np.ndarray:
        """int32 [s]: which of the sample's documents each input token is of, counted from 0."""
        places = (sample * self.seq_len + np.arange(self.seq_len)) % self.tokens + self._start
        sequences = np.searchsorted(self._dataset.pointers, places * self._dataset.dtype.itemsize, side="right") - 1
        documents = np.searchsorted(self._dataset.document_index, sequences, side="right")
        # Where the split begins anew after its end a new document begins too, were it the only one.
        changes = (np.diff(documents) != 0) | (np.diff(places) < 0)
        return np.concatenate([[0], np.cumsum(changes)]).astype(np.int32)

    def _first_id(self, epoch: int) -> int:
        return -(-epoch * self.tokens // self.seq_len)


class SyntheticSamples:
    """Random ids, the same for the same seed: for benchmarks and trials that need no data."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.seq_len = seq_len
        self._vocab_size, self._seed = vocab_size, seed

    def count(self, epochs: int = 1) -> int:
        """As many as anyone asks for; an evaluation of all of them takes this many."""
        return 1024 * epochs

    def id_at(self, position: int) -> int:
        """Random ids need no shuffling."""
        return position

    def tokens_of(self, sample: int) -> np.ndarray:
        """int64 [s + 1]."""
        return np.random.default_rng((self._seed, sample)).integers(self._vocab_size, size=self.seq_len + 1)

    def document_ids(self, sample: int) -> np.ndarray:
        """int32 [s]: one document."""
        return np.zeros(self.seq_len, np.int32)


def split_documents(documents: int, proportions: Sequence[float]) -> list[tuple[int, int]]:
    """Contiguous document ranges in these proportions, such as 969 : 30 : 1; together they are all documents."""
    shares = np.cumsum(proportions) / np.sum(proportions)
    bounds = [0, *(round(documents * float(share)) for share in shares)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def permute(index: int, size: int, key: str) -> int:
    """Where `index` goes in a pseudo-random permutation of range(size), computed for this one index alone.

    A balanced Feistel network permutes the next power of four; an image outside the range is sent through again until it
    falls inside, which keeps it a permutation ("cycle walking", Black and Rogaway, CT-RSA 2002).
    """
    half_bits = (max(1, size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(4):
            message = f"{key}:{round_number}:{right}".encode()
            digest = hashlib.blake2b(message, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < size:
            return index
