"""The global batches of a comparison: random, the same for every layout, and unkind to a wrong reduction."""

import numpy as np

from polarlm.config import RunConfig
from polarlm.data import Batch
from polarlm.model import IGNORED


def global_batch(config: RunConfig, step: int) -> Batch:
    """G samples of S tokens, which depend on (seed, step) alone.

    Sample i of G leaves its first i/G untrained, so that samples, microbatches, data-parallel ranks and shares of a
    sequence have very different numbers of trained tokens, and a mean of means would be wrong. Where documents are
    masked, each sample holds several of random lengths.
    """
    samples, length = config.train.global_batch_size, config.train.seq_len
    assert samples is not None
    assert config.model.vocab_size is not None
    random = np.random.default_rng((config.seed, step))
    ids = random.integers(config.model.vocab_size, size=(samples, length + 1))
    tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    places = np.broadcast_to(np.arange(length), tokens.shape)
    targets[places < (np.arange(samples) * length // samples)[:, None]] = IGNORED
    if not config.data.mask_documents:
        return Batch(tokens, targets, places.copy(), None)
    starts = random.random(tokens.shape) < 4 / length
    starts[:, 0] = True
    first_of_document = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return Batch(tokens, targets, places - first_of_document, starts.cumsum(axis=1, dtype=np.int32))


def microbatches(config: RunConfig, step: int, rank: int, ranks: int) -> list[Batch]:
    """Data-parallel rank `rank` of `ranks`' part of a step's global batch."""
    whole = global_batch(config, step)
    share, micro = len(whole.tokens) // ranks, config.train.micro_batch_size
    return [rows(whole, start, start + micro) for start in range(rank * share, (rank + 1) * share, micro)]


def rows(batch: Batch, start: int, stop: int) -> Batch:
    """Samples [start, stop) of a batch."""
    part = slice(start, stop)
    documents = None if batch.document_ids is None else batch.document_ids[part]
    return Batch(batch.tokens[part], batch.targets[part], batch.positions[part], documents)
