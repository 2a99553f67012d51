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
    """Which tokens of each sequence a place on the context axis holds.

    A ring's rank has two chunks of it, and one without a ring the whole; neighbours that share heads a part each.
    """
    parallel, length = config.parallel, config.train.seq_len
    place, part = divmod(context, parallel.ulysses)
    chunk = length // (2 * parallel.ring)
    chunks = [range(n * chunk, (n + 1) * chunk) for n in (place, 2 * parallel.ring - 1 - place)]
    share = length // parallel.context
    return _cut(chunks if parallel.ring > 1 else [range(length)], part * share, (part + 1) * share)


def _cut(runs: list[range], start: int, stop: int) -> list[range]:
    """What stands from `start` to `stop` in the row of all runs."""
    parts = []
    for run in runs:
        parts.append(run[max(0, start) : max(0, stop)])
        start, stop = start - len(run), stop - len(run)
    return [part for part in parts if part]
