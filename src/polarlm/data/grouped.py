"""An order of documents in which little is padded.

Samples of unlike length that go through a model together are padded to the longest; so it pays to take those of like
length together. They are drawn at random all the same: the shuffled order is cut into windows of many global batches,
and only within a window samples are sorted by length and dealt to its batches, whose order is then mixed.
"""

from functools import lru_cache
from itertools import islice, pairwise

from polarlm.data.blend import BlendedSamples
from polarlm.data.documents import DocumentSamples
from polarlm.data.samples import permute

_WINDOW = 64  # global batches


class GroupedByLength:
    """Samples in an order in which each global batch has some of like length; with one interface with `Samples`.

    Each epoch still gives every sample once: no window reaches over the place where one begins.
    """

    def __init__(self, samples: DocumentSamples | BlendedSamples, batch: int, seed: int) -> None:
        """
        Args:
            batch: samples of a global batch; the order depends on it too.
        """
        self.seq_len = samples.seq_len
        self._samples, self._batch, self._seed = samples, batch, seed
        self.count, self.spread, self.source_of = samples.count, samples.spread, samples.source_of
        self.length_of, self.tokens_of, self.document_ids = samples.length_of, samples.tokens_of, samples.document_ids
        self._window = lru_cache(maxsize=4)(self._order)  # those that are read ahead, and the present

    def id_at(self, position: int) -> int:
        """See `Samples`."""
        number, place = divmod(position, _WINDOW * self._batch)
        return self._window(number)[place]

    def _order(self, number: int) -> list[int]:
        """The samples of a window."""
        start, stop = (which * _WINDOW * self._batch for which in (number, number + 1))
        begins = (position for position in range(start + 1, stop) if self._samples.begins_epoch(position))
        return [sample for stretch in pairwise([start, *begins, stop]) for sample in self._group(*stretch)]

    def _group(self, start: int, stop: int) -> list[int]:
        """The samples of these positions, with those of like length in one global batch."""
        ids = sorted(
            map(self._samples.id_at, range(start, stop)), key=self._samples.length_of
        )  # those alike stay mixed
        borders = [start, *range(start - start % self._batch + self._batch, stop, self._batch), stop]
        sizes = [after - before for before, after in pairwise(borders)]
        dealt, rest = {}, iter(ids)
        for turn in range(len(sizes)):
            batch = permute(turn, len(sizes), f"{self._seed}:batches:{start}")
            dealt[batch] = [*islice(rest, sizes[batch])]
        return [sample for batch in range(len(sizes)) for sample in dealt[batch]]
