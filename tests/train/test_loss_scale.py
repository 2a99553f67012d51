"""Dynamic loss scaling in a run: steps whose gradients overflow fp16 are left out, alike on every rank, and resumed."""

import json
import math
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch

from polarlm.config import TrainConfig, UserError, load_run
from polarlm.parallel import Device, World
from polarlm.train import Progress, fit, learning_rate
from polarlm.train.loss_scale import LossScale
from ranks import run_ranks
from train.trained import open_in

ALONE = World(0, 1, Device(torch.device("cpu")))
SHAPE = "--model.layers 4 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --data.tokenizer bytes"
TRAIN = "--train.seq-len 8 --train.steps 6 --train.global-batch-size 4 --train.micro-batch-size 1"
FP16 = "--train.precision fp16 --train.schedule.name inverse_sqrt --train.schedule.warmup-steps 1"


def _open(world, folder, *flags):
    words = [*SHAPE.split(), *TRAIN.split(), *FP16.split(), "--parallel.ranks", str(world.size), *flags]
    config = load_run(None, environment={}, flags=words).config
    return open_in(world, folder, config)


def _overflow(run, steps):
    """Let what flows backward through a block of one rank grow too large for fp16; `steps` maps steps to ranks."""

    def enlarge(gradient):
        return gradient * 1e10 if steps.get(run.progress.step + 1) == run.world.rank else gradient

    def hook(block, inputs, output):
        if output.requires_grad:
            output.register_hook(enlarge)

    list(run.engine.model.blocks.values())[-1].register_forward_hook(hook)


def _overflow_in_shard(run, steps):
    """The same, in what one rank alone holds of a gradient after all communication."""
    weight = list(run.engine.model.blocks.values())[-1].feed_forward.up.weight
    clip_gradients = run.engine.clip_gradients

    def clip_overflown(*arguments):
        if steps.get(run.progress.step + 1) == run.world.rank:
            _part(weight.grad)[0, 0] = math.inf
        return clip_gradients(*arguments)

    run.engine.clip_gradients = clip_overflown


def _remember(run):
    """This rank's weights and the count of the optimizer's steps before each step, and at the end."""
    seen = []

    def look():
        weights = {name: _part(p).clone() for name, p in run.engine.model.named_parameters()}
        counts = {state["step"].item() for state in run.optimizer.state.values()}
        seen.append((weights, counts))

    forward_backward = run.engine.forward_backward

    def look_first(*arguments):
        look()
        return forward_backward(*arguments)

    run.engine.forward_backward = look_first
    return seen, look


def _part(parameter):
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def _metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _is_same(some, others):
    return all(torch.equal(value, others[name]) for name, value in some.items())


def test_a_step_that_overflows_changes_nothing_and_the_schedule_waits(tmp_path):
    """B38."""
    run = _open(ALONE, tmp_path / "run")
    _overflow(run, {2: 0})
    seen, look = _remember(run)
    fit(run)
    look()
    assert _is_same(seen[1][0], seen[2][0])  # before and after step 2
    assert [counts for _, counts in seen] == [set(), {1.0}, {1.0}, {2.0}, {3.0}, {4.0}, {5.0}]
    assert not any(_is_same(seen[n][0], seen[n + 1][0]) for n in (0, 2, 3, 4, 5))
    lines = _metrics(tmp_path / "run")
    assert [line["lr"] for line in lines] == [learning_rate(k, run.config.train) for k in (1, 2, 2, 3, 4, 5)]
    assert len({line["lr"] for line in lines[1:3]}) == 1 < len({line["lr"] for line in lines})
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1, 1, 1]
    assert [line["loss_scale"] for line in lines] == [2**16, *[2**15] * 5]
    assert [line["samples"] for line in lines] == [4, 8, 12, 16, 20, 24]
    assert [line["grad_norm"] is None for line in lines] == [False, True, False, False, False, False]
    assert all(math.isfinite(line["loss"]) and "bad_step" not in line for line in lines)


@pytest.mark.parametrize("overflows", [{1: 0}, {1: 0, 2: 0}, {3: 0}])
def test_resumed_right_after_skips_it_goes_on_as_if_it_had_not_stopped(tmp_path, overflows):
    """B38: after nothing but skips, too."""
    straight = _open(ALONE, tmp_path / "straight")
    _overflow(straight, overflows)
    fit(straight)
    last = max(overflows)
    first = _open(ALONE, tmp_path / "parted", "--train.steps", str(last))
    _overflow(first, overflows)
    fit(first)
    second = _open(ALONE, tmp_path / "parted")
    assert asdict(second.progress) == asdict(first.progress)
    assert (second.progress.skipped, second.progress.step) == (len(overflows), last)
    fit(second)
    assert _is_same(dict(second.engine.model.named_parameters()), dict(straight.engine.model.named_parameters()))
    kept = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped")
    lines, straight_lines = (
        [[line[key] for key in kept] for line in _metrics(tmp_path / name)] for name in ("parted", "straight")
    )
    assert lines == straight_lines


LAYOUTS = {
    "zero 3": (_overflow_in_shard, "--parallel.zero-stage 3 --train.micro-batch-size 2"),
    "tensor": (_overflow_in_shard, "--parallel.tensor 2 --train.micro-batch-size 4"),
    "1f1b": (_overflow, "--parallel.pipeline 2"),
    "zero bubble": (_overflow, "--parallel.pipeline 2 --parallel.pipeline-schedule zbvzerobubble"),
    "ring": (_overflow, "--parallel.context 2 --train.micro-batch-size 4"),
    "ulysses": (_overflow, "--parallel.context 2 --parallel.context-method ulysses --train.micro-batch-size 4"),
}


def _train_and_look(world, folder, flags, overflow, overflows):
    run = _open(world, folder, *flags)
    overflow(run, overflows)
    seen, look = _remember(run)
    fit(run)
    look()
    changed = [not _is_same(before, after) for (before, _), (after, _) in pairwise(seen)]
    return changed, seen[-1][1], asdict(run.progress)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_is_every_ranks(tmp_path, layout):
    overflow, flags = LAYOUTS[layout]
    arguments = tmp_path / "run", flags.split(), overflow, {2: 0, 4: 1}
    for changed, counts, progress in run_ranks(2, _train_and_look, *arguments):
        assert changed == [True, False, True, False, True, True]
        assert counts == {4.0}
        assert (progress["skipped"], progress["loss_scale"]) == (2, {"scale": 2.0**14, "clean_steps": 2})


def test_what_overflows_fp16_is_no_overflow_in_fp32(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.precision", "fp32")
    run.progress.loss_scale = LossScale(2.0**16)
    _overflow(run, {2: 0})
    fit(run)
    assert run.progress.skipped == 0


def test_the_scale_goes_as_torchs_own():
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    progress, train = Progress(loss_scale=LossScale(64.0)), TrainConfig(steps=20, loss_scale={"growth_interval": 3})
    for is_clean in map(int, "01110111111001101111"):
        theirs.scale(weight.sum() * (1.0 if is_clean else math.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        progress.loss_scale.grow(train.loss_scale.growth_interval) if is_clean else progress.loss_scale.shrink()
        assert progress.loss_scale.scale == theirs.get_scale()


def test_what_no_smaller_scale_would_save_is_a_bad_step(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.loss-scale.initial", "4")
    _overflow(run, dict.fromkeys(range(1, 7), 0))
    with pytest.raises(UserError, match="step 3 gave gradient norm"):
        fit(run)
    assert run.progress.skipped == 2


def test_a_loss_that_is_no_number_is_a_bad_step_and_leaves_the_scale(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.on-bad-step", "skip")
    loss_of = run.engine.loss
    run.engine.loss = lambda batch: loss_of(batch) * (math.nan if run.progress.step == 2 else 1.0)
    fit(run)
    assert (run.progress.skipped, run.progress.loss_scale) == (0, LossScale(2.0**16, clean_steps=5))
    assert "bad_step" in _metrics(tmp_path / "run")[2]


def test_other_precisions_and_older_checkpoints(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.precision", "bf16", "--train.steps", "4")
    fit(run)
    assert run.progress.loss_scale is None
    assert "loss_scale" not in _metrics(tmp_path / "run")[0]
    assert _open(ALONE, tmp_path / "run").progress.loss_scale == LossScale(2.0**16)
    older = {"step": 3, "samples": 12, "tokens": 96, "loss": 2.0}
    assert Progress.from_record(older | {"data": {}}, 3, run.config, tmp_path) == Progress(**older)
