"""Compiled blocks against eager ones: the same steps, the same names."""

import os
import subprocess
import sys

import pytest
import torch

from polarlm.config import load_run
from polarlm.data import Batch
from polarlm.parallel import Engine
from polarlm.train import as_tensors, build_optimizer, train_step
from polarlm.train.layers import LayerStatistics
from polarlm.train.run import seed_dropout
from ranks import run_ranks

ROWS, LENGTH, VOCABULARY, STEPS = 8, 16, 61, 3
SHAPE = {"model.layers": 9, "model.hidden": 32, "model.heads": 4, "model.vocab-size": VOCABULARY}
TRAIN = {"train.steps": STEPS, "train.seq-len": LENGTH, "train.optimizer.eps": 1e-6}
FLAGS = [word for path, value in (SHAPE | TRAIN).items() for word in (f"--{path}", str(value))]


def _batches(step, rank, ranks, with_documents):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator).chunk(ranks)[rank]
    documents = (ids[:, :-1] % 7 == 0).cumsum(1) if with_documents else None
    positions = torch.arange(LENGTH).expand(len(ids), -1)
    batch = (ids[:, :-1], ids[:, 1:], positions, documents)
    halves = zip(*(x.chunk(2) if x is not None else (None, None) for x in batch), strict=True)  # microbatches
    return [Batch(*(None if x is None else x.numpy() for x in half)) for half in halves]


def _train(world, flags, compiles):
    """Losses and norms of three steps (where documents are masked, an evaluation's too), the weights after them, and
    how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    words = [*FLAGS, *flags, "--parallel.ranks", str(world.size), "--train.compile", str(compiles)]
    config = load_run(None, environment={}, flags=words).config
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    steps = []
    for step in range(STEPS):
        seed_dropout(config.seed, step, engine.dropout_rank)
        batches = _batches(step, engine.data_rank, engine.data_ranks, config.data.mask_documents)
        result = train_step(engine, optimizer, batches, clip=0.1)
        steps.append((result.loss, result.grad_norm))
    if config.data.mask_documents:
        steps.append((engine.evaluate(as_tensors(batches[0])), 0.0))
    weights = {name: _whole(weight) for name, weight in engine.model.state_dict().items()}
    return steps, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _eager_and_compiled(world, runs):
    return [[_train(world, flags, compiles) for compiles in (False, True)] for flags in runs]


def _assert_same(eager, compiled, graphs):
    (eager_steps, eager_weights, none), (steps, weights, compiled_graphs) = eager, compiled
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(eager_steps), rtol=1e-5, atol=0)
    assert weights.keys() == eager_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, eager_weights[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    # All blocks share them, so none went past the compiler's limit and back to eager.
    assert (none, compiled_graphs) == (0, graphs)


def test_alone_with_documents_and_dropout():
    flags = ["--model.family", "gpt", "--model.dropout", "0.1", "--data.mask-documents"]
    [[(eager, compiled)]] = run_ranks(1, _eager_and_compiled, [flags], timeout=180)
    # In training and in evaluation what is before attention and what is after; its documents stay eager.
    _assert_same(eager, compiled, graphs=8)


def test_with_recomputation_and_dropout():
    flags = ["--model.family", "llama", "--model.dropout", "0.1", "--train.recompute"]
    runs = [[*flags, "full", "--train.offload-activations", "host"], [*flags, "selective"]]
    [results] = run_ranks(1, _eager_and_compiled, runs, timeout=180)
    for eager, compiled in results:
        _assert_same(eager, compiled, graphs=1)


def test_every_zero_stage():
    flags = ["--model.family", "llama", "--model.kv-heads", "2", "--parallel.zero-stage"]
    for results in run_ranks(2, _eager_and_compiled, [[*flags, str(stage)] for stage in range(4)], timeout=180):
        for eager, compiled in results:
            _assert_same(eager, compiled, graphs=1)


def _statistics(world, compiles):
    """Of each block in three steps, and how many graphs were compiled."""
    torch._dynamo.utils.counters.clear()
    config = load_run(None, environment={}, flags=[*FLAGS, "--train.compile", str(compiles)]).config
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    layers, seen = LayerStatistics(engine, optimizer, every=1, clip=0.1), []
    for step in range(1, STEPS + 1):
        with layers.of_step(step):
            result = train_step(engine, optimizer, _batches(step, 0, 1, False), clip=0.1)
        seen.append(layers.values(result.grad_norm))
    return seen, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_statistics_of_layers_are_an_eager_runs_and_compile_nothing_more():
    (eager, none), (compiled, graphs) = run_ranks(
        1, lambda world: [_statistics(world, compiles) for compiles in (False, True)], timeout=180
    )[0]
    assert (none, graphs) == (0, 1)
    for expected, seen in zip(eager, compiled, strict=True):
        assert sum(name.startswith("activation_rms/blocks.") for name in seen) == 9
        assert seen == {name: pytest.approx(value, rel=1e-4) for name, value in expected.items()}


def test_without_a_compiler_no_step_is_tried(tmp_path):
    flags = [*FLAGS, "--model.vocab-size", "257", "--train.compile", "--parallel.ranks", "2"]
    environment = {**os.environ, "CXX": "no-such-compiler"}
    command = [sys.executable, "-m", "polarlm", "train", *flags]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "train.compile: this host has no C++ compiler" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
