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


@pytest.mark.parametrize("wrong", [{"RANK": "one"}, {"WORLD_SIZE": "-2"}, {"MASTER_PORT": "9" * 5000}, {"RANK": "8"}])
def test_a_wrong_number_names_its_variable(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        rank_from(PLACED | wrong)


OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(["RANK", "SIZE", "LOCAL_RANK"], "341", strict=True)}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_SIZE": "4"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        # B05's own two
        (OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (3, 4, 1, None)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
            (1, 2, 1, None),
        ),
        # torchrun inside each MPI, each MPI inside Slurm's batch script and step
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | OPEN_MPI | MPICH, (1, 2, 0, None)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3"} | BATCH, (3, 4, 1, 2)),
        (MPICH | BATCH, (3, 4, 1, 2)),
        (MPICH | STEP | {"SLURM_STEP_NUM_TASKS": "2"}, (3, 4, 1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"} | PALS, (3, 4, 1, 2)),
        (PALS | {"PMI_SIZE": "8"}, (5, 8, 1, 4)),
        (PALS | {"PMIX_RANK": "5", "POLARLM_WORLD_SIZE": "8"}, (5, 8, 1, 4)),
        # a part of one family is not filled up from another
        ({"OMPI_COMM_WORLD_RANK": "3"} | STEP | {"SLURM_STEP_NUM_TASKS": "4"}, (3, 4, 1, None)),
        ({"RANK": "7", "WORLD_SIZE": "8"} | MPICH, (3, 4, 1, 2)),
        # Slurm: the step's count before the job's, else nodes x tasks a node
        (STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "16"}, (3, 4, 1, None)),
        (STEP | {"SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "4(x2),8"}, (3, 16, 1, 4)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1,3"}, (3, 4, 1, 3)),
        (STEP | {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, (3, 8, 1, None)),
        (STEP | {"SLURM_NTASKS": "", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, (3, 8, 1, None)),
    ],
)
def test_b05_a_place_comes_from_one_family(environ, place):
    found = rank_from(environ)
    assert (found.rank, found.world, found.local_rank, found.local_world) == place


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        BATCH | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMIX_RANK": "0"},
        PALS,
        {"SLURM_PROCID": "3", "SLURM_LOCAL_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"},
        dict.fromkeys([*OPEN_MPI, *MPICH, *STEP], ""),
    ],
)
def test_b05_no_complete_set_is_one_process(environ):
    assert rank_from(environ) is None


def test_b05_a_rank_beyond_its_world_names_both_variables():
    with pytest.raises(UserError, match=r"SLURM_PROCID=3 must be below SLURM_STEP_NUM_TASKS=2"):
        rank_from(STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"})


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


def stand_in(folder, name, text):
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 8),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1,2"}, 1),
    ],
)
def test_devices_of_amd(environ, count, tmp_path, monkeypatch):
    stand_in(tmp_path, "rocm-smi", 'for n in 0 1 2 3 4 5 6 7; do echo "GPU[$n] : Device ID: 0x7408"; done')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_devices(environ) == count


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 12),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 6),
        ({"ZE_AFFINITY_MASK": "0,1"}, 2),
        ({"ZE_AFFINITY_MASK": "0.0,0.1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 1),
    ],
)
def test_l10_tiles_and_cards_count_differently(environ, count, tmp_path, monkeypatch):
    cards = ", ".join(f'{{"device_id": {n}}}' for n in range(6))
    cards = f'{{"device_list": [{cards}]}}'
    tiles = '{"number_of_tiles": 2}'
    text = f"case \"$*\" in 'discovery -j') echo '{cards}';; *) echo '{tiles}';; esac"
    stand_in(tmp_path, "xpu-smi", text)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_devices(environ) == count


def test_a_machine_without_the_drivers_program_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_devices({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
