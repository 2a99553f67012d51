"""Pipeline stages: which layers each holds, and on which rank it stands; by arithmetic, without torch."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from polarlm.config.model import ModelConfig
from polarlm.config.run import ParallelConfig, RunConfig

LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")  # a rank's stages are r, r + p, r + 2p, ...
V_SHAPED = ("zbvzerobubble", "dualpipev")  # a rank's two stages are r and 2p-1-r
SPLIT_BACKWARD = ("interleavedzerobubble", *V_SHAPED)  # gradients of inputs first, of weights when there is time


@dataclass(frozen=True)
class Stage:
    """A run of layers, with the embedding before the first and the head behind the last."""

    number: int
    rank: int  # along the pipeline axis
    layers: range
    is_first: bool
    is_last: bool


def pipeline_stages(config: RunConfig) -> list[Stage]:
    """All stages of a run in order; one that holds everything where there is no pipeline."""
    parallel = config.parallel
    count = parallel.stages
    counts = parallel.pipeline_split or balanced_split(config.model, config.train.seq_len, count)
    starts = accumulate(counts, initial=0)
    return [
        Stage(number, _rank_of(number, parallel), range(first, end), number == 0, number == count - 1)
        for number, (first, end) in enumerate(pairwise(starts))
    ]


def balanced_split(model: ModelConfig, seq_len: int, stages: int) -> list[int]:
    """Layers of each stage, so that the costliest costs least; the head counts as the layers it is worth."""
    assert model.vocab_size is not None
    if stages == 1:
        return [model.layers]
    head = model.hidden * model.vocab_size / _block_cost(model, seq_len)
    others = stages - 1

    def dearest(last: int) -> float:
        return max(-(-(model.layers - last) // others), last + head)

    last = min(range(1, model.layers - others + 1), key=dearest)
    even, over = divmod(model.layers - last, others)
    # The first stages have the most activations in flight, so what is left over goes to later ones.
    return [even + (number >= others - over) for number in range(others)] + [last]


def _block_cost(model: ModelConfig, seq_len: int) -> int:
    """A block's multiplications a token: its matrices, and the half of the scores that a causal mask leaves."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.hidden * (2 * query + 2 * key) + seq_len * query
    return attention + (3 if model.activation == "swiglu" else 2) * model.hidden * model.ffn


def _rank_of(stage: int, parallel: ParallelConfig) -> int:
    ranks = parallel.pipeline
    if parallel.pipeline_schedule in V_SHAPED and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks
