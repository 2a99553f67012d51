"""Training samples by arithmetic: no index of samples is ever built, on disk or in memory.

A split is a range of documents, and so T tokens of the dataset's stream. Repeated without end it is cut into samples of
length s: sample i reads the s + 1 tokens from i·s on, so that neighbours share one. Epoch e holds the samples whose
first token lies in it,

    ids  ⌈e·T/s⌉ .. ⌈(e+1)·T/s⌉ - 1,

and visits them in a permutation of its own. The epochs follow one another, so position and id lie in the same epoch,
and the epoch of either is ⌊i·s/T⌋.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from polarlm.config import UserError
from polarlm.data.indexed import IndexedDataset


@dataclass(eq=False)
class SplitSamples:
    """What the samples of a dataset's split have in common, whether they are cut from its stream or its documents.

    Attributes:
        documents: the split's first document and the one after its last.
        seq_len: s, the tokens a sample trains on, or the most of them.
        shuffle: without it, position and id are the same.
        vocab_size: the model's, which has no room for larger ids; None takes any.
        tokens: of the split; of documents that are alone, those that they train.
    """

    dataset: IndexedDataset
    documents: tuple[int, int]
    seq_len: int
    seed: int
    shuffle: bool = True
    vocab_size: int | None = None
    tokens: int = field(init=False)

    def count(self, epochs: int = 1) -> int:
        """Samples in that many epochs."""
        raise NotImplementedError

    def spread(self, count: int) -> list[int]:
        """Ids of `count` samples spread evenly over one epoch."""
        return [index * self.count() // count for index in range(count)]

    def source_of(self, sample: int) -> int:
        """There is one source."""
        return 0

    def checked(self, ids: np.ndarray) -> np.ndarray:
        """The same ids.

        Raises:
            UserError: one is beyond the model's vocabulary.
        """
        if self.vocab_size is not None and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise UserError(
                f"{self.dataset.prefix}.bin: holds ids from {ids.min()} to {ids.max()}, and model.vocab_size is "
                f"{self.vocab_size}; the file is damaged or of another tokenizer, prepare the data again"
            )
        return ids


@dataclass(eq=False)
class Samples(SplitSamples):
    """The samples of a split in their global order, which depends on (seed, data) and nothing else."""

    def __post_init__(self) -> None:
        self._start, stop = (self.dataset.document_start(number) for number in self.documents)
        self.tokens = stop - self._start

    def count(self, epochs: int = 1) -> int:
        """Whole samples in that many epochs: ⌊(E·T - 1) / s⌋, and none in no tokens."""
        return max(0, (epochs * self.tokens - 1) // self.seq_len)

    def id_at(self, position: int) -> int:
        """The sample at a position of the global order; every id stands at one position, epoch after epoch."""
        if not self.shuffle:
            return position
        epoch = position * self.seq_len // self.tokens
        first, stop = self._first_id(epoch), self._first_id(epoch + 1)
        return first + permute(position - first, stop - first, f"{self.seed}:{epoch}")

    def tokens_of(self, sample: int) -> np.ndarray:
        """int64 [s + 1]: the sample's inputs and, one later, its targets.

        Raises:
            UserError: one is beyond the model's vocabulary.
        """
        runs = [self.dataset.read(start, count) for start, count in self._runs(sample, self.seq_len + 1)]
        return self.checked(np.concatenate(runs, dtype=np.int64))

    def document_ids(self, sample: int) -> np.ndarray:
        """int32 [s]: which of the sample's documents each input token is of, counted from 0."""
        begins = np.zeros(self.seq_len, np.int32)
        place = 0
        for start, count in self._runs(sample, self.seq_len):
            begins[place] = 1  # where the split begins anew a document does too, were it the only one
            first, last = self.dataset.document_at(start), self.dataset.document_at(start + count - 1)
            offsets = self.dataset.starts_of(first + 1, last + 1) - start
            if ((offsets < 0) | (offsets >= count)).any():
                raise self.dataset.damaged("its documents are not in order")
            begins[place + offsets] = 1
            place += count
        return np.cumsum(begins, dtype=np.int32) - 1

    def _first_id(self, epoch: int) -> int:
        return -(-epoch * self.tokens // self.seq_len)

    def _runs(self, sample: int, count: int) -> Iterator[tuple[int, int]]:
        """(start, count) in the dataset's stream of each unbroken run of the sample's first `count` tokens."""
        place = sample * self.seq_len % self.tokens
        while count:
            run = min(count, self.tokens - place)
            yield self._start + place, run
            count, place = count - run, 0


class SyntheticSamples:
    """Random ids, the same for the same seed: for benchmarks and trials that need no data."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        self.seq_len = seq_len
        self._vocab_size, self._seed = vocab_size, seed

    def count(self, epochs: int = 1) -> int:
        """As many as anyone asks for; an evaluation of all of them takes this many."""
        return 1024 * epochs

    def spread(self, count: int) -> list[int]:
        """Any ids are as good as any others."""
        return list(range(count))

    def source_of(self, sample: int) -> int:
        """There is one source."""
        return 0

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
    """Contiguous ranges (start, stop) of documents in these proportions, such as 969 : 30 : 1; together they are all.

    Raises:
        UserError: the proportions are all zero.
    """
    if not any(proportions):
        raise UserError(f"data.split: {list(proportions)} gives every part nothing; make one of them positive")
    shares = np.cumsum(proportions)
    return list(pairwise([0, *(round(documents * float(share)) for share in shares / shares[-1])]))


def permute(index: int, size: int, key: str) -> int:
    """Where `index` goes in the pseudo-random permutation of range(size) that `key` names, computed for it alone.

    Four rounds of a Feistel network, (left, right) -> (right, left ⊕ f(right)), permute the pairs of h-bit halves
    whatever f is (Luby and Rackoff, SIAM J. Comput. 17(2), 1988). They are 4^h ≥ size indices, fewer than 4·size; one
    sent outside the range is sent on until it falls inside, which keeps this a permutation of the range ("cycle
    walking": Black and Rogaway, CT-RSA 2002).
    """
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(4):
            digest = hashlib.blake2b(f"{key}:{round_number}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < size:
            return index
