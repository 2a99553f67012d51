"""How long the sequences of a step are: from its place in the data alone, before anything is read, and so the same on
every rank, however a run came there."""

from dataclasses import dataclass

from polarlm.config import TrainConfig


@dataclass(frozen=True)
class StepShape:
    """What a step's global batch comes to.

    Attributes:
        seq_len: tokens of each of its sequences.
        tokens: that it trains on.
    """

    seq_len: int
    tokens: int


class StepShapes:
    """The shape of every step of a run."""

    def __init__(self, train: TrainConfig) -> None:
        assert train.global_batch_size is not None, "a resolved run says it"
        self._train, self._samples = train, train.global_batch_size

    def at(self, first_sample: int) -> StepShape:
        """Of the step whose global batch begins at this place of the samples' order."""
        step = first_sample // self._samples + 1
        return StepShape(self._train.seq_len_at(step), self._samples * self._train.seq_len)
