"""Two data-parallel ranks against one process, with a reference loop that shares nothing with the engine."""

import pytest
import torch

from polarlm.config import load_run
from polarlm.data import Batch
from polarlm.model import IGNORED, Transformer, initialise
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step
from ranks import run_ranks

SHAPE = {"model.layers": 2, "model.hidden": 32, "model.heads": 4, "model.vocab-size": 61}
TRAIN = {"train.steps": 3, "train.seq-len": 16, "train.optimizer.eps": 1e-6}
FLAGS = [word for path, value in (SHAPE | TRAIN).items() for word in (f"--{path}", str(value))]
LAYOUTS = {  # ranks and flags of a layout
    "alone": (1, []),
    "zero 0 x2": (2, []),
    "zero 0 x4": (4, []),
    **{
        f"zero {stage} x{ranks}": (ranks, ["--parallel.zero-stage", str(stage)])
        for stage in (1, 2, 3)
        for ranks in (2, 4)
    },
    **{
        f"zero {stage} in groups of 2, x4": (4, ["--parallel.zero-stage", str(stage), "--parallel.hybrid", "2"])
        for stage in (1, 2, 3)
    },
    "tensor 2": (2, ["--parallel.tensor", "2"]),
    "tensor 4": (4, ["--parallel.tensor", "4"]),
    "tensor 2 x zero 3 x2": (4, ["--parallel.tensor", "2", "--parallel.zero-stage", "3"]),
    "ulysses 2": (2, ["--parallel.context", "2", "--parallel.context-method", "ulysses"]),
    "ring 2": (2, ["--parallel.context", "2"]),
    "ring 4": (4, ["--parallel.context", "4"]),
    "ulysses 4, zero 3": (
        4,
        ["--parallel.context", "4", "--parallel.context-method", "ulysses", "--parallel.zero-stage", "3"],
    ),
    "ring 2 x tensor 2": (4, ["--parallel.context", "2", "--parallel.tensor", "2"]),
    "ulysses 2 x tensor 2": (
        4,
        ["--parallel.context", "2", "--parallel.tensor", "2", "--parallel.context-method", "ulysses"],
    ),
    "ring 2 x zero 3 x2": (4, ["--parallel.context", "2", "--parallel.zero-stage", "3"]),
    "zero 3 x2 in host memory": (2, ["--parallel.zero-stage", "3", "--parallel.offload", "parameters"]),
}
FAMILIES = {
    "gpt": ["--model.family", "gpt"],
    "llama": ["--model.family", "llama", "--model.kv-heads", "2"],
    "llama tied": ["--model.family", "llama", "--model.tied-embeddings", "true"],
}


def _config(family, ranks, flags=()):
    flags = [*FLAGS, *FAMILIES[family], "--parallel.ranks", str(ranks), *flags]
    return load_run(None, environment={}, flags=flags).config


def _global_batch(step, samples=8, seq_len=16, vocab=61):
    """Samples with very different numbers of trained tokens, so that a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab, (samples, seq_len + 1), generator=generator)
    tokens, targets = ids[:, :-1], ids[:, 1:].clone()
    for row in range(samples):
        targets[row, : 2 * row] = IGNORED
    return tokens, targets


def _batches(step, rank, ranks, micro):
    tokens, targets = (x.chunk(ranks)[rank] for x in _global_batch(step))
    positions = torch.arange(16).expand(micro, -1)
    return [
        Batch(t.numpy(), y.numpy(), positions.numpy(), None)
        for t, y in zip(tokens.split(micro), targets.split(micro), strict=True)
    ]


def _train(world, family, flags, micro, clip):
    """Three steps of the engine; losses, norms, and every gathered gradient of step 1 and weight after step 3."""
    config = _config(family, world.size, flags)
    engine = Engine(config, world)
    model, optimizer = engine.model, build_optimizer(engine.model, config.train.optimizer)
    gradients, steps = {}, []

    def keep_first(*_):
        if not gradients:
            gradients.update({name: _whole(parameter.grad) for name, parameter in model.named_parameters()})

    optimizer.register_step_pre_hook(keep_first)
    for step in range(3):
        batches = _batches(step, engine.data_rank, engine.data_ranks, micro)
        result = train_step(engine, optimizer, batches, clip=clip)
        steps.append((result.loss, result.grad_norm))
    return steps, gradients, {n: _whole(p) for n, p in model.named_parameters()}


def _whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _reference(family, clip):
    """The plain model in a plain loop: whole batch, mean over trained tokens, torch's own clipping and AdamW."""
    config = _config(family, 1)
    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=3e-4, betas=(0.9, 0.95), eps=1e-6,
    )  # fmt: skip
    gradients, steps = {}, []
    for step in range(3):
        tokens, targets = _global_batch(step)
        logits = model(tokens, torch.arange(16)[None])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps, gradients, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "micro"), [("gpt", 1), ("llama", 2), ("llama tied", 1)])
def test_every_layout_takes_the_same_steps(family, layout, micro):
    ranks, flags = LAYOUTS[layout]
    clip = 0.1  # small enough to act, so a wrong norm shows in the weights
    steps, gradients, weights = _reference(family, clip)
    results = run_ranks(ranks, _train, family, flags, micro, clip)
    for rank_steps, rank_gradients, rank_weights in results:
        torch.testing.assert_close(torch.tensor(rank_steps), torch.tensor(steps), rtol=1e-5, atol=0)
        _assert_close(rank_gradients, gradients)
        _assert_close(rank_weights, weights)
    for _, _, rank_weights in results[1:]:
        assert all(torch.equal(rank_weights[name], results[0][2][name]) for name in weights)


@pytest.mark.parametrize("layout", ["zero 0 x2", "zero 3 x2", "tensor 2", "ring 2"])
@pytest.mark.parametrize(
    "options",
    [
        ["--train.optimizer.name", "muon"],
        ["--train.optimizer.name", "adafactor", "--train.optimizer.lr", "1e-2"],
        ["--train.z-loss", "1e-2", "--train.label-smoothing", "0.1"],
    ],
)
def test_every_option_is_the_same_on_every_layout(layout, options):
    ranks, flags = LAYOUTS[layout]
    [(steps, gradients, weights)] = run_ranks(1, _train, "llama", options, 2, 0.1)
    for rank_steps, rank_gradients, rank_weights in run_ranks(ranks, _train, "llama", [*flags, *options], 2, 0.1):
        torch.testing.assert_close(torch.tensor(rank_steps), torch.tensor(steps), rtol=1e-5, atol=0)
        _assert_close(rank_gradients, gradients)
        _assert_close(rank_weights, weights)


def _assert_close(actual, expected):
    """Each tensor within 1e-5 of its own norm; what should be zero (a key's bias) within rounding of the whole."""
    assert actual.keys() == expected.keys()
    rounding = 1e-7 * torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        difference, norm = (actual[name] - value).norm(), value.norm()
        assert difference <= 1e-5 * norm + rounding, f"{name}: {difference / norm:.1e}"  # false for NaN too


def _dropout_masks(world, seed):
    from polarlm.train.run import seed_dropout

    seed_dropout(seed, 1, world.rank)
    return torch.nn.functional.dropout(torch.ones(1000), 0.5)


def test_dropout_differs_between_data_parallel_ranks_and_repeats():
    first, second = run_ranks(2, _dropout_masks, 7), run_ranks(2, _dropout_masks, 7)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert 0.4 < (first[0] != first[1]).float().mean() < 0.6


def _initial_weights(world):
    model = Engine(_config("gpt", world.size), world).model
    return {n: _whole(p) for n, p in model.named_parameters()}


def test_the_start_is_the_same_on_any_number_of_ranks():
    config = _config("gpt", 1)
    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    for ranks in (1, 2):
        for weights in run_ranks(ranks, _initial_weights):
            assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


def test_a_window_without_trained_tokens_is_no_division_by_zero():
    [(loss, norm)] = run_ranks(1, _train_on_nothing)
    assert (loss, norm) == (0.0, 0.0)


def _train_on_nothing(world):
    config = _config("llama", 1)
    engine = Engine(config, world)
    batch = _batches(0, 0, 1, 8)[0]
    batch.targets[:] = IGNORED
    result = train_step(engine, build_optimizer(engine.model, config.train.optimizer), [batch], clip=1.0)
    return result.loss, result.grad_norm
