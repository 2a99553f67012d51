"""A run's folder as `polarlm train` makes it, opened or trained in by ranks forked from the test."""

import json

from polarlm.config import dump_run
from polarlm.data import load_tokenizer
from polarlm.train import fit, open_run
from ranks import run_ranks


def make_folder(folder, config):
    """Make it, for ranks to open; or change the configuration of one that is there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_run(config))
    load_tokenizer("bytes").save(folder / "tokenizer")


def open_in(world, folder, config):
    """Make it on the first rank, and open the run on every rank."""
    if world.is_first:
        make_folder(folder, config)
    world.barrier()
    return open_run(folder, config, world)


def train_in(folder, config):
    """Begin the run, or go on with it; the lines of its metrics."""
    make_folder(folder, config)
    run_ranks(config.parallel.ranks, _fit, folder, config)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _fit(world, folder, config):
    fit(open_run(folder, config, world))
