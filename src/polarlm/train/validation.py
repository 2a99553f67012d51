"""The loss on text the model does not train on: the same samples at every pass."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from polarlm.data import AnySamples, Batch, StepShapes, batch_of
from polarlm.model import IGNORED
from polarlm.parallel import Engine
from polarlm.train.step import as_tensors


@dataclass(frozen=True)
class ValidationResult:
    """One pass; the same on every rank, and for any number of ranks and batch size."""

    loss: float  # nats a token
    bits_per_byte: float | None  # None where tokens stand for no bytes
    tokens: int
    seconds: float  # this rank's own
    loss_of_source: dict[str, float] = field(default_factory=dict)


class Validation:
    """A fixed set of validation samples, spread evenly over the split."""

    def __init__(
        self,
        samples: AnySamples,
        most_samples: int | None,
        token_bytes: np.ndarray | None,
        mask_documents: bool,
        sources: Sequence[str] = (),
        shapes: StepShapes | None = None,
    ) -> None:
        """
        Args:
            most_samples: how many to use; None is all of the split.
            token_bytes: int32 [V], the UTF-8 bytes each id stands for; None where ids stand for no text.
            sources: names of the datasets of a blend, to score each on its own too.
            shapes: say how long the sequences of a batch are; without them samples stay as they are.
        """
        available = samples.count()
        ids = samples.spread(min(available, most_samples or available))
        self._samples, self._shapes = samples, shapes
        self._sources = sources
        # Samples of one source go together, so that a batch's loss is its source's.
        groups = range(len(sources)) if sources else [None]
        self._groups = [[one for one in ids if group in (None, samples.source_of(one))] for group in groups]
        self._token_bytes = token_bytes
        self._mask_documents = mask_documents

    def run(self, engine: Engine, batch_size: int) -> ValidationResult:
        """Score every sample once, shared out over the ranks."""
        began = time.perf_counter()
        scores = [self._score(engine, batch_size, ids) for ids in self._groups]
        loss, tokens, text_bytes = (sum(column) for column in zip(*scores, strict=True))
        return ValidationResult(
            loss=loss / max(tokens, 1),
            bits_per_byte=loss / math.log(2) / text_bytes if text_bytes else None,
            tokens=int(tokens),
            seconds=time.perf_counter() - began,
            loss_of_source={
                name: loss / tokens for name, (loss, tokens, _) in zip(self._sources, scores, strict=False) if tokens
            },
        )

    def _score(self, engine: Engine, batch_size: int, ids: list[int]) -> tuple[float, float, float]:
        """(loss in nats, tokens, bytes) of some samples, all ranks' together."""
        loss, tokens, text_bytes = 0.0, 0, 0
        for batch in self._batches(engine, batch_size, ids):
            loss += engine.evaluate(as_tensors(batch))
            scored = batch.targets[batch.targets != IGNORED]
            tokens += scored.size
            text_bytes += 0 if self._token_bytes is None else int(self._token_bytes[scored].sum())
        (loss,) = engine.sum(loss)
        tokens, text_bytes = engine.sum_over_samples(tokens, text_bytes)
        return loss, tokens, text_bytes

    def _batches(self, engine: Engine, batch_size: int, ids: list[int]) -> Iterator[Batch]:
        """This rank's batches: as many as every other rank's, so that none waits for another in a forward pass."""
        stride = engine.data_ranks * batch_size
        for start in range(0, len(ids), stride):
            first = start + engine.data_rank * batch_size
            own = ids[first : first + batch_size]
            scored = own or ids[:1]
            seq_len = self._shapes.of(scored).seq_len if self._shapes else None
            batch = batch_of(self._samples, scored, self._mask_documents, seq_len)
            if not own:
                batch = Batch(batch.tokens, np.full_like(batch.targets, IGNORED), batch.positions, batch.document_ids)
            yield batch
