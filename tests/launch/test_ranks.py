"""A rank's place is read from one launcher's complete set; devices are counted as the driver counts them."""

import os

import pytest

from polarlm.config import UserError
from polarlm.launch import Rank, local_devices, rank_from

PLACED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "nid0001",
    "MASTER_PORT": "29400",
}


def test_a_complete_set_is_a_place():
    assert rank_from(PLACED) == Rank(5, 8, 1, 4, "nid0001", 29400)


def test_nobody_launched_this_process():
    assert rank_from({}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", [None, ""])
def test_part_of_a_set_or_an_empty_variable_is_none(name, value):
    environ = {key: text for key, text in PLACED.items() if key != name} | ({} if value is None else {name: value})
    assert rank_from(environ) is None


def test_what_a_launcher_does_not_say_is_none():
    alone = {name: PLACED[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    empty = {"MASTER_ADDR": "", "MASTER_PORT": "", "LOCAL_WORLD_SIZE": ""}
    assert rank_from(alone | empty) == Rank(5, 8, 1, None, None, None)


@pytest.mark.parametrize("wrong", [{"RANK": "one"}, {"WORLD_SIZE": "-2"}, {"MASTER_PORT": "x"}, {"RANK": "8"}])
def test_a_wrong_number_names_its_variable(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        rank_from(PLACED | wrong)


@pytest.fixture
def four_devices(tmp_path, monkeypatch):
    """A stand-in for the driver's program, which lists four devices, one of them cut in two."""
    program = tmp_path / "nvidia-smi"
    lines = "\\n".join(f"GPU {n}: NVIDIA A100 (UUID: GPU-{n})" for n in range(4))
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && printf "{lines}\\n  MIG 1g.5gb Device 0: (UUID: MIG-0)\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 4), ("0,1", 2), ("3", 1), ("", 0), ("-1", 0), ("0,9,1", 1), ("GPU-0,GPU-1", 2), ("NoDevFiles", 0)],
)
def test_devices_are_those_the_driver_lets_a_process_see(four_devices, chosen, count):
    assert local_devices({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_a_machine_without_the_drivers_program_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_devices({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
