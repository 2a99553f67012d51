"""Bad steps: stopped at, left out, or gone round by a rewind; the same on every rank."""

import json
import math

import pytest
import torch

from polarlm.config import UserError, load_run
from polarlm.parallel import Device, World
from polarlm.train import fit
from polarlm.train.steady import Typical
from ranks import run_ranks
from train.trained import open_in

ALONE = World(0, 1, Device(torch.device("cpu")))
SHAPE = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --data.tokenizer bytes"
TRAIN = "--train.seq-len 8 --train.steps 8 --train.global-batch-size 4 --train.micro-batch-size 2 --checkpoint.every 2"
BAD = 20  # the first sample of step 6


def _open(world, folder, *flags):
    words = [*SHAPE.split(), *TRAIN.split(), "--parallel.ranks", str(world.size), *flags]
    config = load_run(None, environment={}, flags=words).config
    return open_in(world, folder, config)


def _spoil(run, samples=(BAD,), by=math.nan):
    """Let the loss of the global batches that begin at these samples be multiplied, on one rank alone."""
    loss_of = run.engine.loss

    def spoilt(batch):
        is_bad = run.progress.samples in samples and run.world.rank == run.world.size - 1
        return loss_of(batch) * (by if is_bad else 1.0)

    run.engine.loss = spoilt


def _ids(run):
    return [run.samples.id_at(place) for place in range(BAD, BAD + 4)]


def _weights(run):
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    return {name: whole(parameter.detach()).clone() for name, parameter in run.engine.model.named_parameters()}


def _metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _events(folder, kind):
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def _train(world, folder, remedy, *flags):
    run = _open(world, folder, "--train.on-bad-step", remedy, *flags)
    _spoil(run)
    fit(run)
    return _weights(run)


def test_a_bad_step_stops_the_run_before_it_changes_anything(tmp_path):
    run = _open(ALONE, tmp_path / "run")
    _spoil(run)
    with pytest.raises(UserError, match=r"step 6 gave loss nan.*on_bad_step.*newest checkpoint: step 4"):
        fit(run)
    assert all(value.isfinite().all() for value in _weights(run).values())
    assert run.progress.step == 5
    *taken, stopped = _metrics(tmp_path / "run")
    assert [line["step"] for line in taken] == [1, 2, 3, 4, 5]
    bad = {"fault": "loss nan", "first_sample": BAD, "sample_ids": _ids(run)}
    assert (stopped["step"], stopped["bad_step"]) == (6, bad)
    (event,) = _events(tmp_path / "run", "bad step")
    assert (event["step"], event["sample_ids"]) == (6, _ids(run))
    run = _open(ALONE, tmp_path / "run")
    assert _metrics(tmp_path / "run")[-1]["step"] == 4  # where it goes on


def test_a_skipped_step_leaves_weights_and_moments_alone(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.on-bad-step", "skip")
    _spoil(run)
    before = {}
    step = run.optimizer.step

    def remember():
        before[run.progress.samples] = _weights(run)
        step()

    run.optimizer.step = remember
    fit(run)
    assert sorted(before) == [0, 4, 8, 12, 16, 24, 28]  # no step of the optimizer at sample 20
    assert {state["step"].item() for state in run.optimizer.state.values()} == {7}
    line = _metrics(tmp_path / "run")[5]
    assert line["step"] == 6
    assert line["grad_norm"] is None
    assert line["bad_step"] == {"fault": "loss nan", "first_sample": BAD, "sample_ids": _ids(run)}
    (event,) = _events(tmp_path / "run", "bad step")
    assert (event["step"], event["first_sample"], event["sample_ids"]) == (6, BAD, _ids(run))


def test_a_rewound_run_ends_as_one_that_skipped(tmp_path):
    skipped = _train(ALONE, tmp_path / "skip", "skip")
    rewound = _train(ALONE, tmp_path / "rewind", "rewind")
    assert all(torch.equal(rewound[name], skipped[name]) for name in skipped)
    (event,) = _events(tmp_path / "rewind", "rewind")
    assert (event["step"], event["first_sample"], event["samples"]) == (4, BAD, 4)
    (bad,) = _events(tmp_path / "rewind", "bad step")
    assert (bad["step"], bad["fault"], bad["first_sample"]) == (6, "loss nan", BAD)
    lines = _metrics(tmp_path / "rewind")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[5]["bad_step"]["fault"] == "passed over"
    assert [line["step"] for line in lines if line["tokens_per_sec"] is None or line["mfu"] is None] == [6]
    # What was passed over stays so after a resume.
    run = _open(ALONE, tmp_path / "rewind", "--train.steps", "10")
    assert run.progress.passed_over == [BAD]


@pytest.mark.parametrize("layout", [(), ("--parallel.zero-stage", "3")])
def test_all_ranks_decide_alike(tmp_path, layout):
    skipped = run_ranks(2, _train, tmp_path / "skip", "skip", *layout)
    rewound = run_ranks(2, _train, tmp_path / "rewind", "rewind", *layout)
    for name, value in skipped[0].items():
        assert value.isfinite().all()
        assert torch.equal(skipped[1][name], value)
        assert torch.equal(rewound[0][name], value)


def test_a_rewind_without_a_checkpoint_says_what_to_set(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.on-bad-step", "rewind", "--checkpoint.every", "0")
    _spoil(run)
    with pytest.raises(UserError, match=r"train\.on_bad_step.*checkpoint\.every"):
        fit(run)


def test_a_run_that_goes_wrong_on_and_on_ends(tmp_path):
    run = _open(ALONE, tmp_path / "run", "--train.on-bad-step", "skip", "--train.steps", "40")
    _spoil(run, samples=range(20, 200))
    with pytest.raises(UserError, match="step 15 gave loss nan"):
        fit(run)


def test_a_spike_is_bad_once_what_is_typical_is_known(tmp_path):
    run = _open(
        ALONE, tmp_path / "run", "--train.on-bad-step", "skip", "--train.spike-factor", "10", "--train.steps", "30"
    )
    _spoil(run, samples=(8, 100), by=1e3)
    fit(run)
    (event,) = _events(tmp_path / "run", "bad step")
    assert event["first_sample"] == 100
    assert event["fault"].startswith("loss")
    assert event["fault"].endswith("times its running mean")


def test_running_means_are_means_first_and_forget_slowly():
    typical = Typical()
    for value in (1.0, 2.0, 6.0):
        typical.take_in(value, 10 * value)
    assert (typical.loss, typical.grad_norm, typical.steps) == (pytest.approx(3), pytest.approx(30), 3)
    assert typical.fault(1e9, 1.0, 2.0) is None  # too early to tell
    assert typical.fault(math.inf, 1.0, None) == "loss inf"
    assert typical.fault(1.0, math.nan, None) == "gradient norm nan"
