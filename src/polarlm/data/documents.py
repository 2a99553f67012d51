"""Documents as samples, each alone."""

from dataclasses import dataclass

import numpy as np

from polarlm.data.samples import SplitSamples, permute


@dataclass(eq=False)
class DocumentSamples(SplitSamples):
    """The documents of a split as samples, each with its own length and alone; with one interface with `Samples`.

    A document of n tokens trains n - 1, each but the last on the one that follows it, and one longer than s is cut:
    piece j trains the tokens from j·s on, s or what is left. A document of one token is no sample. The samples are
    numbered through the split, and epoch e holds numbers e·N .. (e+1)·N - 1 in an order of its own. Unlike a stream
    this needs the index whole: 16 bytes a document are held.
    """

    def __post_init__(self) -> None:
        first, stop = self.documents
        self._starts = self.dataset.document_starts()[first : stop + 1]
        trained = np.maximum(np.diff(self._starts) - 1, 0)
        pieces = -(-trained // self.seq_len)
        self._first_piece = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)])
        self.tokens = int(trained.sum())

    def count(self, epochs: int = 1) -> int:
        """Samples in that many epochs."""
        return epochs * int(self._first_piece[-1])

    def id_at(self, position: int) -> int:
        """The sample at a position of the global order; every id stands at one position, epoch after epoch."""
        epoch, place = divmod(position, self.count())
        return position - place + permute(place, self.count(), f"{self.seed}:{epoch}") if self.shuffle else position

    def begins_epoch(self, position: int) -> bool:
        """Whether an epoch begins there."""
        return position % self.count() == 0

    def length_of(self, sample: int) -> int:
        """The tokens that a sample trains."""
        start, stop = self._range(sample)
        return stop - start - 1

    def tokens_of(self, sample: int) -> np.ndarray:
        """int64 [length + 1]: the sample's inputs and, one later, its targets.

        Raises:
            UserError: one is beyond the model's vocabulary.
        """
        start, stop = self._range(sample)
        return self.checked(self.dataset.read(start, stop - start).astype(np.int64))

    def document_ids(self, sample: int) -> np.ndarray:
        """int32 [length]: one document."""
        return np.zeros(self.length_of(sample), np.int32)

    def _range(self, sample: int) -> tuple[int, int]:
        """(start, stop) in the dataset's stream of its inputs and targets."""
        piece = sample % self.count()
        document = int(np.searchsorted(self._first_piece, piece, side="right")) - 1
        start = int(self._starts[document]) + (piece - int(self._first_piece[document])) * self.seq_len
        return start, min(start + self.seq_len + 1, int(self._starts[document + 1]))
