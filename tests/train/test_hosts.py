"""Hosts that do not go together are refused where their ranks meet, each by name; every rank stops."""

import time
from dataclasses import replace

import pytest
import torch

import polarlm
from polarlm.config import UserError, load_run
from polarlm.launch import Folder
from polarlm.train import hosts
from ranks import run_ranks

SHAPE = [
    "--model.family",
    "llama",
    "--model.layers",
    "2",
    "--model.hidden",
    "32",
    "--model.heads",
    "4",
    "--model.vocab-size",
    "257",
]
CONFIG = load_run(None, environment={}, flags=[*SHAPE, "--data.tokenizer", "bytes"]).config


def meet(folder, change):
    """(None or the mistake, what was printed) of two ranks on two hosts, where `change` alters the second."""

    def work(world):
        patch, said = pytest.MonkeyPatch(), []
        patch.setattr(hosts, "short_host_name", lambda: f"n{world.rank + 1}")
        patch.setattr(hosts, "print", lambda line, flush: said.append(line), raising=False)
        if world.rank == 1:
            change(patch)
        try:
            hosts.check_hosts(folder, CONFIG, world)
        except UserError as error:
            return str(error), said
        return None, said

    return run_ranks(2, work)


def test_equal_hosts_say_nothing(tmp_path):
    assert meet(tmp_path, lambda patch: None) == [(None, []), (None, [])]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda patch: patch.setattr(torch, "__version__", "1.0"), "n2: torch is 1.0, and 2."),
        (lambda patch: patch.setattr(polarlm, "__version__", "9.9"), "n2: polarlm is 9.9, and "),
        (
            lambda patch: patch.setattr(
                hosts, "look_at_folder", lambda *_: Folder("", "/runs/x", "Read-only", 1 << 40)
            ),
            "n2: /runs/x: cannot be written (Read-only)",
        ),
        (
            lambda patch: patch.setattr(hosts, "look_at_folder", lambda *_: Folder("", "/runs/x", "", 1000)),
            "n2: /runs/x: 0.0 GiB free",
        ),
    ],
)
def test_a_host_that_is_another_is_refused_by_name(change, words, tmp_path):
    (first, _), (second, _) = meet(tmp_path, change)
    assert first == second
    assert first.startswith(words)


def test_a_clock_minutes_off_is_a_warning(tmp_path):
    def late(patch):
        now = time.time
        patch.setattr(time, "time", lambda: now() + 500)

    (first, said), (second, nothing) = meet(tmp_path, late)
    assert first is second is None
    assert nothing == []
    assert said[0].startswith("warning: n2: the clock is ")
    assert "ahead" in said[0]


def test_ranks_of_one_host_look_once(tmp_path):
    def work(world):
        patch, looks = pytest.MonkeyPatch(), []
        real = hosts.look_at_folder
        patch.setattr(hosts, "look_at_folder", lambda *given: looks.append(1) or real(*given))
        hosts.check_hosts(tmp_path, CONFIG, world)
        return len(looks)

    assert run_ranks(2, work) == [1, 0]


def test_little_room_is_said(tmp_path, monkeypatch, capsys):
    parameters = hosts.count_parameters(CONFIG.model)
    room = replace(hosts.look_at_folder("checkpoints", tmp_path), free_bytes=13 * parameters)
    monkeypatch.setattr(hosts, "look_at_folder", lambda *_: room)
    run_alone(tmp_path)
    assert capsys.readouterr().out.startswith(f"warning: {tmp_path}: 0.0 GiB free; make room: checkpoints may come to")


def run_alone(folder):
    from polarlm.parallel import Device, World

    hosts.check_hosts(folder, CONFIG, World(0, 1, Device(torch.device("cpu"))))
