"""How long the sequences of a step are: from its place in the data alone, before anything is read, and so the same on
every rank, however a run came there."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from polarlm.config import RunConfig, sequence_unit
from polarlm.data.blend import BlendedSamples
from polarlm.data.documents import DocumentSamples
from polarlm.data.grouped import GroupedByLength
from polarlm.data.samples import Samples, SyntheticSamples

AnySamples = Samples | DocumentSamples | BlendedSamples | GroupedByLength | SyntheticSamples


@dataclass(frozen=True)
class StepShape:
    """What a global batch, or a part of one, comes to.

    Attributes:
        seq_len: places of each of its sequences.
        tokens: that it trains on.
        positions: places of all its sequences; those without a token of their own are padding.
    """

    seq_len: int
    tokens: int
    positions: int


class StepShapes:
    """The shape of every step of a run."""

    def __init__(self, config: RunConfig, samples: AnySamples) -> None:
        assert config.train.global_batch_size is not None, "a resolved run says it"
        self._train, self._batch, self._samples = config.train, config.train.global_batch_size, samples
        self._are_documents = config.data.samples == "documents"
        self._unit = sequence_unit(config.parallel)
        self.at = lru_cache(maxsize=8)(self._at)  # asked by who reads a step ahead, and by who took it

    def of(self, ids: Iterable[int]) -> StepShape:
        """Of these samples, taken whole and together: the longest's length, as far as ranks can share it out."""
        if not self._are_documents:
            tokens = sum(self._train.seq_len for _ in ids)
            return StepShape(self._train.seq_len, tokens, tokens)
        lengths = [self._samples.length_of(sample) for sample in ids]
        seq_len = min(-(-max(lengths) // self._unit) * self._unit, self._train.seq_len)
        return StepShape(seq_len, sum(lengths), len(lengths) * seq_len)

    def _at(self, first_sample: int) -> StepShape:
        """Of the step whose global batch begins at this place of the samples' order."""
        if self._are_documents:
            return self.of(map(self._samples.id_at, range(first_sample, first_sample + self._batch)))
        tokens = self._batch * self._train.seq_len
        return StepShape(self._train.seq_len_at(first_sample // self._batch + 1), tokens, tokens)
