"""What is seen of a run from outside its loop: events, samples, statistics of the layers, a profile; and that looking
changes nothing."""

import json
import logging
import math
import time
from types import SimpleNamespace

import pytest
import torch

from polarlm.checkpoint import load_model
from polarlm.config import UserError, load_run
from polarlm.data import load_tokenizer
from polarlm.generate import Settings, generate, write_samples
from polarlm.parallel import Device, World
from polarlm.train import fit, open_run
from polarlm.train.speed import Speedometer
from ranks import run_ranks
from train.trained import make_folder

ALONE = World(0, 1, Device(torch.device("cpu")))
SHAPE = "--model.family llama --model.layers 2 --model.hidden 32 --model.heads 4 --model.vocab-size 257"
TRAIN = "--train.steps 4 --train.seq-len 16 --train.global-batch-size 4 --data.tokenizer bytes"


def _prepare(folder, *flags):
    config = load_run(None, environment={}, flags=[*SHAPE.split(), *TRAIN.split(), *flags]).config
    make_folder(folder, config)
    return config


def _train(world, folder, config, after_save=None):
    run = open_run(folder, config, world)
    fit(run, after_save)
    return {name: _whole(parameter) for name, parameter in run.engine.model.named_parameters()}


def _whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_tell_of_evaluations_saves_warnings_and_the_end(tmp_path):
    saves = ("--checkpoint.every", "3", "--checkpoint.in-background", "false")
    config = _prepare(tmp_path / "run", "--train.eval-every", "2", *saves)

    def warn(folder, step):
        logging.getLogger("polarlm.any").warning("at %d", step)

    _train(ALONE, tmp_path / "run", config, warn)
    events = _lines(tmp_path / "run" / "events.jsonl")
    assert [(event["step"], event["event"]) for event in events] == [
        (0, "start"),
        (2, "evaluation"),
        (3, "save"),
        (3, "warning"),
        (4, "evaluation"),
        (4, "save"),
        (4, "warning"),
        (4, "end"),
    ]
    assert events[3]["message"] == "at 3"
    assert all(events[number]["seconds"] > 0 for number in (1, 2)), "what a walltime's end is reckoned from"
    metrics = {line["step"]: line for line in _lines(tmp_path / "run" / "metrics.jsonl")}
    assert events[1]["val_loss"] == metrics[2]["val_loss"]


def test_events_tell_why_a_run_broke_off(tmp_path):
    config = _prepare(tmp_path / "run", "--train.optimizer.lr", "1e38", "--train.optimizer.clip", "0")
    with pytest.raises(UserError):
        _train(ALONE, tmp_path / "run", config)
    last = _lines(tmp_path / "run" / "events.jsonl")[-1]
    assert last["event"] == "error"
    assert "train.optimizer.lr" in last["message"]


def test_what_fails_after_a_save_ends_nothing(tmp_path):
    config = _prepare(tmp_path / "run", "--log.samples", "far too long a prompt for sixteen positions")
    _train(ALONE, tmp_path / "run", config, write_samples)
    events = _lines(tmp_path / "run" / "events.jsonl")
    assert events[-2]["event"] == "warning"
    assert "do not fit in the model's context" in events[-2]["message"]


@pytest.mark.parametrize("layout", [[], ["--parallel.ranks", "2"], ["--parallel.ranks", "2", "--parallel.tensor", "2"]])
def test_samples_are_what_each_checkpoint_writes(tmp_path, layout):
    folder = tmp_path / "run"
    asks = ["--log.samples", "a", "bcd", "--log.sample-tokens", "5", "--checkpoint.every", "2"]
    config = _prepare(folder, *asks, *layout)
    run_ranks(config.parallel.ranks, _train, folder, config, write_samples)
    settings = Settings(temperature=0.8, max_tokens=5, seed=0)
    expected = [
        {"step": step, "prompt": prompt, "text": completion.text}
        for step in (2, 4)
        for prompt, completion in zip(
            ["a", "bcd"],
            generate(load_model(folder, step), load_tokenizer("bytes"), ["a", "bcd"], settings),
            strict=True,
        )
    ]
    assert _lines(folder / "samples.jsonl") == expected


LAYOUTS = {
    "2 ranks": ["--parallel.ranks", "2"],
    "zero 3": ["--parallel.ranks", "2", "--parallel.zero-stage", "3"],
    "tensor 2": ["--parallel.ranks", "2", "--parallel.tensor", "2"],
    "pipeline 2": ["--parallel.ranks", "2", "--parallel.pipeline", "2"],
}


def _statistics(folder, *flags):
    """Weights at the end of a run, and of each step's metrics what is said of the layers."""
    config = _prepare(folder, "--train.optimizer.clip", "0.1", *flags)
    weights = run_ranks(config.parallel.ranks, _train, folder, config)[0]
    lines = _lines(folder / "metrics.jsonl")
    return weights, [{k: v for k, v in line.items() if "/" in k or k == "grad_norm"} for line in lines]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_layers_are_the_same_on_every_layout(tmp_path, layout):
    _, alone = _statistics(tmp_path / "alone", "--log.layer-statistics", "2")
    _, seen = _statistics(tmp_path / "seen", "--log.layer-statistics", "2", *LAYOUTS[layout])
    assert all(line.keys() == {"grad_norm"} for line in seen[::2])
    for line, expected in zip(seen[1::2], alone[1::2], strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
        parts = [value for name, value in line.items() if name.startswith("grad_norm/")]
        assert len(parts) == 5  # embedding, two blocks, norm, head
        assert math.hypot(*parts) == pytest.approx(line["grad_norm"], rel=1e-4)


def test_a_tied_head_on_another_stage_counts_once(tmp_path):
    tied = ["--log.layer-statistics", "4", "--model.tied-embeddings", "true"]
    alone, seen = (
        _statistics(tmp_path / layout, *tied, *LAYOUTS[layout])[1][-1] for layout in ("2 ranks", "pipeline 2")
    )
    assert seen == pytest.approx(alone, rel=1e-4)
    assert "grad_norm/head" not in seen


def test_looking_at_layers_changes_nothing(tmp_path):
    plain, seen = (_statistics(tmp_path / every, "--log.layer-statistics", every)[0] for every in ("0", "1"))
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def test_activations_are_those_of_a_plain_forward_pass(tmp_path):
    config = _prepare(tmp_path / "run", "--log.layer-statistics", "1", "--train.steps", "1")
    run = open_run(tmp_path / "run", config, ALONE)
    model, hidden = run.engine.model, []
    tokens = torch.stack([torch.from_numpy(run.samples.tokens_of(i)[:-1].astype("int64")) for i in range(4)])
    state = model.embedding(tokens, torch.arange(16)[None])
    for block in model.blocks.values():
        state = block(state, model.rotary(torch.arange(16)[None]))
        hidden.append(state.square().mean().sqrt().item())
    fit(run)
    (line,) = _lines(tmp_path / "run" / "metrics.jsonl")
    assert [line[f"activation_rms/blocks.{n}"] for n in (0, 1)] == pytest.approx(hidden, rel=1e-5)


@pytest.mark.parametrize("asked", [2, 4])
def test_a_profile_is_a_trace_and_a_table(tmp_path, asked):
    """Some steps after the first three; of four, a run of five steps has two, and what it began of a third."""
    config = _prepare(tmp_path / "run", "--profile", str(asked), "--train.steps", "5")
    _train(ALONE, tmp_path / "run", config)
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
    seen = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert sum(name.startswith("ProfilerStep") for name in seen) == min(asked, 3)
    assert "aten::mm" in (tmp_path / "run" / "profile" / "operations.txt").read_text()


def test_no_step_counts_the_time_of_writing_a_profile(tmp_path, monkeypatch):
    written = []

    def write_for_long(profiler, path):
        written.append(path)

    clock = lambda: time.perf_counter() + 1000 * len(written)  # noqa: E731
    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", write_for_long)
    monkeypatch.setattr("polarlm.train.loop.time", SimpleNamespace(perf_counter=clock))
    _train(ALONE, tmp_path / "run", _prepare(tmp_path / "run", "--profile", "1", "--train.steps", "6"))
    assert len(written) == 1
    assert all(0 < line["step_time_s"] < 1000 for line in _lines(tmp_path / "run" / "metrics.jsonl"))


def test_a_run_too_short_to_profile_says_so(tmp_path):
    _train(ALONE, tmp_path / "run", _prepare(tmp_path / "run", "--profile", "2", "--train.steps", "2"))
    assert "nothing to see" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.gpu
def test_a_profile_has_a_memory_snapshot_where_the_device_can(tmp_path):
    config = _prepare(tmp_path / "run", "--profile", "1", "--train.steps", "6")
    _train(World(0, 1, Device(torch.device("cuda", 0))), tmp_path / "run", config)
    assert (tmp_path / "run" / "profile" / "memory.pickle").stat().st_size


def test_a_group_of_ranks_counts_its_tokens_once():
    flags = [*SHAPE.split(), *TRAIN.split(), "--parallel.ranks", "4"]
    speeds = []
    for layout in ([], ["--parallel.tensor", "4"], ["--parallel.context", "2"], ["--parallel.zero-stage", "3"]):
        config = load_run(None, environment={}, flags=[*flags, *layout]).config
        speed = Speedometer(config, ALONE.device).measure(2.0)
        speeds.append({name: value for name, value in speed.items() if name != "mfu"})
    assert all(speed == speeds[0] for speed in speeds)
    assert speeds[0]["tokens_per_sec"] == 4 * 16 / 2.0
    assert speeds[0]["tokens_per_sec_per_device"] == 4 * 16 / 2.0 / 4
