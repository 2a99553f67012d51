"""A run trained in a folder, by ranks forked from the test."""

import json

from polarlm.config import dump_run
from polarlm.data import load_tokenizer
from polarlm.train import fit, open_run
from ranks import run_ranks


def train_in(folder, config):
    """Begin the run, or go on with it; the lines of its metrics."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_run(config))
    load_tokenizer("bytes").save(folder / "tokenizer")
    run_ranks(config.parallel.ranks, _fit, folder, config)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _fit(world, folder, config):
    fit(open_run(folder, config, world))
