"""Places, layers, samples and tokens by arithmetic against those of real ranks."""

import pytest
import torch

from polarlm.config import load_run, places, samples_at, stages_at, tokens_at
from polarlm.data import Loader, SyntheticSamples
from polarlm.parallel import Engine
from ranks import run_ranks

MODEL = (
    "--model.layers 8 --model.hidden 16 --model.heads 4 --model.vocab-size 64 --train.seq-len 16 --train.steps 1 "
    "--train.global-batch-size 16 --train.micro-batch-size 1"
).split()
LAYOUTS = [
    "--parallel.ranks 8 --parallel.tensor 2 --parallel.context 2 --parallel.zero-stage 3",
    "--parallel.ranks 8 --parallel.pipeline 2 --parallel.pipeline-schedule zbvzerobubble --parallel.context 2 "
    "--parallel.context-method ulysses --parallel.zero-stage 1",
    "--parallel.ranks 8 --parallel.tensor 2 --parallel.context 4 --parallel.context-method hybrid "
    "--parallel.context-ulysses 2 --parallel.zero-stage 3",
    "--parallel.ranks 8 --parallel.context 8 --parallel.context-method hybrid --parallel.context-ulysses 4",
    "--parallel.ranks 8 --parallel.zero-stage 2 --parallel.hybrid 2 --parallel.tensor 2",
    "--parallel.ranks 4 --parallel.pipeline 2 --parallel.pipeline-schedule interleaved1f1b --parallel.tensor 2",
    "--parallel.ranks 2",
    "--parallel.ranks 1",
]
AXES = ("pipeline", "data", "context", "tensor", "replicate", "shard")


def _look(world, config):
    engine = Engine(config, world)
    whole = torch.arange(config.train.seq_len)[None]
    tokens = engine._share((whole, whole, None, whole))[0][0].tolist()
    samples = SyntheticSamples(config.model.vocab_size, config.train.seq_len, config.seed)
    batch = config.train.global_batch_size
    share = Loader(
        samples, global_batch_size=batch, micro_batch_size=1, rank=engine.data_rank, ranks=engine.data_ranks,
        start_sample=0,
    )  # fmt: skip
    with share:
        first = [row.tokens[0].tolist() for row in next(share)]
    everyone = [samples.tokens_of(number)[:-1].tolist() for number in range(batch)]
    return (
        {axis: engine.mesh.rank(axis) for axis in AXES},
        sorted(map(int, engine.model.blocks)),
        [everyone.index(row) for row in first],
        tokens,
    )


@pytest.mark.parametrize("flags", LAYOUTS)
def test_real_ranks_stand_and_hold_what_the_arithmetic_says(flags):
    config = load_run(None, environment={}, flags=[*MODEL, *flags.split()]).config
    found = run_ranks(config.parallel.ranks, _look, config)
    assert len(found) == len(places(config.parallel))
    for place, (axes, layers, samples, tokens) in zip(places(config.parallel), found, strict=True):
        assert {axis: getattr(place, axis) for axis in AXES} == axes
        assert sorted(layer for stage in stages_at(config, place.pipeline) for layer in stage.layers) == layers
        assert list(samples_at(config, place.data)) == samples
        assert [token for run in tokens_at(config, place.context) for token in run] == tokens
