"""The training loss of each dataset of a blend, from the very forward passes that train."""

from collections.abc import Sequence

import numpy as np
import torch

from polarlm.data import Batch
from polarlm.parallel import Engine


class SourceLosses:
    """Adds up a step's loss by the dataset that each sample is of; without datasets it does nothing."""

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine, self._names = engine, names

    def begin(self) -> None:
        """Before a step's first forward pass."""
        self._engine.model.loss.rows = [] if self._names else None

    def sums(self, microbatches: Sequence[Batch]) -> list[float]:
        """After the last: this rank's part of each dataset's summed loss, then of its trained tokens.

        Args:
            microbatches: those of the step, in the order in which they went through the model.
        """
        rows = self._engine.model.loss.rows
        if not rows:  # not asked for, or a pipeline stage without the loss
            return [0.0] * (2 * len(self._names))
        losses, tokens = torch.cat(rows).T.cpu().numpy()
        sources = np.concatenate([batch.sources for batch in microbatches])
        sums = [np.bincount(sources, weights, len(self._names)) for weights in (losses, tokens)]
        return np.concatenate(sums).tolist()

    def means(self, sums: Sequence[float]) -> dict[str, float]:
        """Nats a token of each dataset that the step had samples of, from all ranks' `sums` added up.

        The ranks of a tensor group add the same losses and tokens, which leaves the means as they are.
        """
        losses, tokens = sums[: len(self._names)], sums[len(self._names) :]
        return {name: loss / count for name, loss, count in zip(self._names, losses, tokens, strict=True) if count}
