"""The loss on text the model does not train on: the same samples at every pass."""

import math
from dataclasses import dataclass

import numpy as np

from polarlm.data import Batch, Samples, SyntheticSamples, batch_of
from polarlm.model import IGNORED
from polarlm.parallel import Engine
from polarlm.train.step import as_tensors


@dataclass(frozen=True)
class ValidationResult:
    """One pass; the same on every rank, and for any number of ranks and batch size."""

    loss: float  # nats a token
    bits_per_byte: float | None  # None where tokens stand for no bytes
    tokens: int


class Validation:
    """A fixed set of validation samples, spread evenly over the split."""

    def __init__(
        self,
        samples: Samples | SyntheticSamples,
        most_samples: int | None,
        token_bytes: np.ndarray | None,
        mask_documents: bool,
    ) -> None:
        """
        Args:
            most_samples: how many to use; None is all of the split.
            token_bytes: int32 [V], the UTF-8 bytes each id stands for; None where ids stand for no text.
        """
        available = samples.count()
        used = min(available, most_samples or available)
        self._samples = samples
        self._ids = [index * available // used for index in range(used)]
        self._token_bytes = token_bytes
        self._mask_documents = mask_documents

    def run(self, engine: Engine, batch_size: int) -> ValidationResult:
        """Score every sample once, shared out over the ranks."""
        loss, tokens, text_bytes = 0.0, 0, 0
        for batch in self._batches(engine, batch_size):
            loss += engine.evaluate(as_tensors(batch))
            scored = batch.targets[batch.targets != IGNORED]
            tokens += scored.size
            text_bytes += 0 if self._token_bytes is None else int(self._token_bytes[scored].sum())
        loss, tokens, text_bytes = engine.sum(loss, tokens, text_bytes)
        bits_per_byte = loss / math.log(2) / text_bytes if text_bytes else None
        return ValidationResult(loss / max(tokens, 1), bits_per_byte, int(tokens))

    def _batches(self, engine: Engine, batch_size: int):
        """This rank's batches: as many as every other rank's, so that none waits for another in a forward pass."""
        stride = engine.data_ranks * batch_size
        for start in range(0, len(self._ids), stride):
            first = start + engine.data_rank * batch_size
            ids = self._ids[first : first + batch_size]
            batch = batch_of(self._samples, ids or self._ids[:1], self._mask_documents)
            if not ids:
                batch = Batch(batch.tokens, np.full_like(batch.targets, IGNORED), batch.positions, batch.document_ids)
            yield batch
