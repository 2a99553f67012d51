"""Which rank holds what: its place on each axis, its layers, samples, tokens and shares, by arithmetic without torch.

`parallel.Mesh` numbers real ranks alike: tensor innermost, where the network is fastest, then context, data and
pipeline (arXiv 2104.04473).
"""

from dataclasses import dataclass
from itertools import product

from polarlm.config.run import ParallelConfig, RunConfig
from polarlm.config.stages import Stage, pipeline_stages


@dataclass(frozen=True)
class Place:
    """One rank's place on every axis, of both views of the mesh."""

    rank: int
    pipeline: int
    data: int
    context: int
    tensor: int
    replicate: int
    shard: int


def places(parallel: ParallelConfig) -> list[Place]:
    """The place of every rank of a resolved layout, in their order."""
    axes = (parallel.pipeline, parallel.data, parallel.context, parallel.tensor)
    grid = enumerate(product(*map(range, axes)))
    return [
        Place(rank, stage, data, context, tensor, *divmod(data * parallel.context + context, parallel.shards))
        for rank, (stage, data, context, tensor) in grid
    ]


def stages_at(config: RunConfig, pipeline: int) -> list[Stage]:
    """The stages that a place on the pipeline axis holds, in their order."""
    return [stage for stage in pipeline_stages(config) if stage.rank == pipeline]


def samples_at(config: RunConfig, data: int) -> range:
    """Which samples of each global batch a place on the data axis takes."""
    assert config.train.global_batch_size is not None
    share = config.train.global_batch_size // config.parallel.data
    return range(data * share, (data + 1) * share)


def tokens_at(config: RunConfig, context: int) -> list[range]:
    """Which tokens of each sequence a place on the context axis holds: a run for Ulysses, two chunks for a ring."""
    ranks, length = config.parallel.context, config.train.seq_len
    if ranks == 1:
        return [range(length)]
    if config.parallel.context_method == "ulysses":
        return [range(context * length // ranks, (context + 1) * length // ranks)]
    chunk = length // (2 * ranks)
    return [range(place * chunk, (place + 1) * chunk) for place in (context, 2 * ranks - 1 - context)]
