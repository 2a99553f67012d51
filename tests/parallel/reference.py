"""What the tests of layouts share: a small run on any layout, and the same in a plain loop that knows no engine."""

import torch
import torch.nn.functional as F

from polarlm.config import load_run
from polarlm.data import Batch
from polarlm.model import IGNORED, Transformer, initialise
from polarlm.parallel import Engine
from polarlm.train import build_optimizer, train_step

SAMPLES, SEQ, VOCAB = 8, 16, 61
SHAPE = {"model.layers": 2, "model.hidden": 32, "model.heads": 4, "model.vocab-size": VOCAB}
TRAIN = {"train.steps": 3, "train.seq-len": SEQ, "train.optimizer.eps": 1e-6}
FLAGS = [word for path, value in (SHAPE | TRAIN).items() for word in (f"--{path}", str(value))]
FAMILIES = {
    "gpt": ["--model.family", "gpt"],
    "llama": ["--model.family", "llama", "--model.kv-heads", "2"],
    "llama tied": ["--model.family", "llama", "--model.tied-embeddings", "true"],
}
# Lengths of the documents of each packed sample: one alone, some that cross every border of shares, some of one token.
DOCUMENTS = [(16,), (5, 1, 10), (1,) * 16, (3, 8, 5), (8, 8), (15, 1), (1, 15), (2,) * 8]


def run_config(family, ranks, flags=()):
    """The small run on so many ranks."""
    flags = [*FLAGS, *FAMILIES[family], "--parallel.ranks", str(ranks), *flags]
    return load_run(None, environment={}, flags=flags).config


def global_batch(step, packed=False):
    """(tokens, positions, document ids or None, targets) of samples with very different numbers of trained tokens, so
    that a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    tokens, targets = ids[:, :-1], ids[:, 1:].clone()
    for row in range(SAMPLES):
        targets[row, : 2 * row] = IGNORED
    if not packed:
        return tokens, torch.arange(SEQ).expand(SAMPLES, -1), None, targets
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in DOCUMENTS]
    numbers = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in DOCUMENTS]
    return tokens, torch.stack(positions), torch.stack(numbers), targets


def rank_batches(step, rank, ranks, micro, packed=False):
    """A data-parallel rank's microbatches of a global batch."""
    share = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    parts = [None if x is None else x[share].split(micro) for x in global_batch(step, packed)]
    tokens, positions, documents, targets = (part or [None] * (SAMPLES // ranks // micro) for part in parts)
    return [
        Batch(t.numpy(), y.numpy(), p.numpy(), None if d is None else d.numpy())
        for t, y, p, d in zip(tokens, targets, positions, documents, strict=True)
    ]


def train(world, family, flags, micro, clip, packed=False, loss_scale=1.0):
    """Three steps of the engine; losses, norms, and every gathered gradient of step 1 and weight after step 3."""
    config = run_config(family, world.size, flags)
    engine = Engine(config, world)
    model, offloads = engine.model, config.parallel.offload == "optimizer"
    optimizer = build_optimizer(model, config.train.optimizer, in_host_memory=offloads)
    gradients, steps = {}, []

    def keep_first(*_):
        if not gradients:
            gradients.update({name: whole(parameter.grad) for name, parameter in model.named_parameters()})

    optimizer.register_step_pre_hook(keep_first)
    for step in range(3):
        batches = rank_batches(step, engine.data_rank, engine.data_ranks, micro, packed)
        result = train_step(engine, optimizer, batches, clip=clip, loss_scale=loss_scale)
        steps.append((result.loss, result.grad_norm))
    return steps, gradients, {n: whole(p) for n, p in model.named_parameters()}


def whole(tensor):
    """A copy of a tensor in full, whatever this rank holds of it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def plain_steps(family, clip, packed=False, flags=()):
    """What `train` should give: the plain model in a plain loop, mean over trained tokens, torch's own clipping and
    AdamW. Packed documents are taken one by one, so that no mask is needed."""
    config = run_config(family, 1, flags)
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
        loss = _plain_loss(model, step, packed)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps, gradients, {n: p.detach() for n, p in model.named_parameters()}


def _plain_loss(model, step, packed):
    tokens, _, _, targets = global_batch(step)
    if not packed:
        return F.cross_entropy(model(tokens, torch.arange(SEQ)[None]).flatten(0, 1), targets.flatten())
    logits = [
        model(document[None], torch.arange(len(document))[None])[0]
        for row, lengths in zip(tokens, DOCUMENTS, strict=True)
        for document in row.split(lengths)
    ]
    return F.cross_entropy(torch.cat(logits), targets.flatten())


def assert_close(actual, expected):
    """Each tensor within 1e-5 of its own norm; what should be zero (a key's bias) within rounding of the whole."""
    rounding = 1e-7 * torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in actual.items():
        difference, norm = (value - expected[name]).norm(), expected[name].norm()
        assert difference <= 1e-5 * norm + rounding, f"{name}: {difference / norm:.1e}"  # false for NaN too


def assert_same_run(results, expected):
    """Every rank's steps are the expected ones; so are the gradients and weights that it holds, and together they hold
    all; and ranks that hold the same weights hold them to the bit."""
    steps, gradients, weights = expected
    for rank_steps, rank_gradients, rank_weights in results:
        torch.testing.assert_close(torch.tensor(rank_steps), torch.tensor(steps), rtol=1e-5, atol=0)
        assert_close(_untied(rank_gradients, gradients), gradients)
        assert_close(_untied(rank_weights, weights), weights)
    held = [_untied(rank_weights, weights) for _, _, rank_weights in results]
    together = {name: value for rank_weights in reversed(held) for name, value in rank_weights.items()}
    assert together.keys() == weights.keys()
    assert all(torch.equal(value, together[name]) for rank_weights in held for name, value in rank_weights.items())


def _untied(tensors, expected):
    """Under the names of one process: a last pipeline stage's tied head is the embedding."""
    if "head.weight" in expected or "head.weight" not in tensors:
        return tensors
    head, rest = tensors["head.weight"], {name: each for name, each in tensors.items() if name != "head.weight"}
    if "embedding.tokens.weight" in rest:
        assert torch.equal(head, rest["embedding.tokens.weight"])
    return rest | {"embedding.tokens.weight": head}
