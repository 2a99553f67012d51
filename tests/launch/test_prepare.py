"""One command for every machine: golden dry runs, and the cases in which launchers went wrong before."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polarlm.config import UserError
from polarlm.launch import Request, describe, prepare
from scenes import DOCUMENT, HYDRA, OPEN_MPI, PALS, SCENES, TEXTS, dry_run, with_dry_runs

LOGS = Path("/work/logs")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine without schedulers, launchers and devices, called `laptop`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")


@pytest.fixture
def program(tmp_path):
    def make(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def job(tmp_path):
    """The environment of a PBS job whose node file has these lines."""

    def make(lines, job_id="1000.server"):
        (tmp_path / "nodes").write_text("\n".join(lines.split()) + "\n")
        return {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": job_id}

    return make


def launch(environment, is_dry=True, **wanted):
    return prepare(["prog"], Request(**wanted), environment, LOGS, is_dry=is_dry)


def words(environment, **wanted):
    return " ".join(launch(environment, **wanted).command)


def setting(environment, name, **wanted):
    return next((each.value for each in launch(environment, **wanted).settings if each.name == name), None)


@pytest.mark.parametrize("name", SCENES)
def test_each_machines_dry_run_is_as_it_was(name, tmp_path):
    (tmp_path / "scene").mkdir()
    assert dry_run(SCENES[name], tmp_path / "scene") == (TEXTS / f"{name}.txt").read_text()


def test_the_document_shows_what_is_said():
    texts = {name: (TEXTS / f"{name}.txt").read_text() for name in SCENES}
    assert with_dry_runs(DOCUMENT.read_text(), texts) == DOCUMENT.read_text()


def test_a_shell_reads_the_shown_lines_of_open_mpi_as_what_is_run(program, tmp_path):
    program("mpirun", OPEN_MPI)
    modules = {f"MODULE_NUMBER_{number}": "set" for number in range(60)}
    command = [sys.executable, "-c", "two  words\nand lines", "-x", "NAME"]
    said = prepare(command, Request(hosts="a:2,b:2"), modules, tmp_path)
    shown = describe(said).partition("\ncommand\n")[2]
    script = f"printf '%s\\0' {shown}"
    read = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert read.split("\0")[:-1] == said.command
    assert len(shown.splitlines()) > 10


# B01


def test_b01_slurms_list_without_scontrol():
    said = launch({"SLURM_JOB_NODELIST": "na,nb[001,003],nc", "SLURM_JOB_ID": "7"})
    assert [host.name for host in said.spread.hosts] == ["na", "nb001", "nb003", "nc"]
    assert "--nodes=4 --ntasks=4 --ntasks-per-node=1" in " ".join(said.command)
    assert setting({"SLURM_JOB_NODELIST": "na,nb[001,003],nc"}, "MASTER_ADDR") == "na"
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST"):
        launch({"SLURM_JOB_NODELIST": "h[1-"})


# B02


def test_b02_nodes_times_ranks_a_node(job, program):
    program("mpiexec", PALS)
    environment = job("a a b b a b")
    said = launch(environment, devices_per_node=4)
    assert "-n 8 --ppn 4" in " ".join(said.command)
    assert said.host_file == (LOGS / "hosts", "a\nb\n")
    assert words(job("a a a a a a a a"), devices_per_node=4).count("-n 4 --ppn 4") == 1


def test_b02_an_uneven_file_warns_or_is_used_as_it_is(job, program):
    program("mpiexec", HYDRA)
    with_devices = launch(job("a a a b"), devices_per_node=4)
    assert "-n 8 --ppn 4" in " ".join(with_devices.command)
    assert any("a 3, b 1" in warning for warning in with_devices.warnings)
    by_slots = launch(job("a a a b"))
    assert by_slots.host_file[1] == "a:3\nb:1\n"
    assert "-n 4 -f" in " ".join(by_slots.command)
    assert any("a 3, b 1" in warning for warning in by_slots.warnings)


@pytest.mark.parametrize(("name", "text"), [("mpiexec", PALS), ("srun", "")])
def test_b02_a_launcher_that_cannot_be_uneven_says_so(name, text, job, program):
    program(name, text)
    with pytest.raises(UserError, match=r"--ranks-per-node: .*a 3, b 1"):
        launch(job("a a a b"), launcher="srun" if name == "srun" else None)


# B03


def test_b03_slots_of_a_host_file_are_ranks(tmp_path, program):
    program("mpirun", OPEN_MPI)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2")
    said = launch({}, host_file=tmp_path / "hosts")
    assert said.spread.world == 4
    assert said.host_file[1] == "a slots=2\nb slots=2\n"
    with pytest.raises(UserError, match="nofile"):
        launch({}, host_file=tmp_path / "nofile")


# B07


def test_b07_the_port_is_the_jobs(job, program):
    program("mpiexec", HYDRA)
    ports = [setting(job("a b", job_id), "MASTER_PORT") for job_id in ("1000.s", "1000.s", "1001.s")]
    assert ports[0] == ports[1] != ports[2]
    assert all(1024 < int(port) < 65536 for port in ports)


def test_b07_one_torchrun_a_node():
    environment = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    said = words(environment, launcher="torchrun")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in said
    assert "--nnodes=2 --master-addr=a" in said
    assert "--nproc-per-node=4" in said


def test_b07_one_machine_leaves_the_port_to_the_system():
    said = launch({}, ranks=2)
    assert said.kind == "local"
    assert not any(each.name.startswith("MASTER") for each in said.settings)


# L06


def test_l06_a_smaller_request_is_kept_exactly(job, program):
    program("mpiexec", PALS)
    environment = job("a b c d")
    one = launch(environment, nodes=1, devices_per_node=4)
    assert [host.name for host in one.spread.hosts] == ["a"]
    assert "-n 4 --ppn 4" in " ".join(one.command)
    assert one.host_file[1] == "a\n"
    three = launch(job("a b"), ranks=3, devices_per_node=4)
    assert [(host.name, host.slots) for host in three.spread.hosts] == [("a", 3)]
    assert launch(job("a b"), ranks=6, devices_per_node=4).spread.ranks_per_node == 3
    assert "-n 4 --ppn 2" in words(job("a b"), ranks_per_node=2, devices_per_node=4)
    assert "--nodelist=a" in words({"SLURM_JOB_NODELIST": "a,b"}, nodes=1)
    tasks = {"SLURM_JOB_NODELIST": "a,b", "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"}
    assert "--nodes=2 --ntasks=8 --ntasks-per-node=4" in words(tasks)
    assert "--nodes=2 --ntasks=4 --ntasks-per-node=2" in words(tasks | {"SLURM_GPUS_ON_NODE": "2"})


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({"nodes": 3}, "--nodes: 3 cannot be; .* has 2 hosts"),
        ({"nodes": 0}, "--nodes: 0"),
        ({"ranks": 5}, "--ranks: 5 cannot be spread evenly over 2 nodes of 4; nearest: 4 or 6"),
        ({"ranks": 9}, "9 is more than 2 nodes x 4 = 8"),
        ({"ranks_per_node": 5}, "--ranks-per-node: 5 cannot be; give at most the 4 devices"),
        ({"ranks_per_node": 0}, "--ranks-per-node: 0"),
        ({"ranks_per_node": 2, "ranks": 3}, "3 cannot be spread evenly over 2 nodes of 2; nearest: 2 or 4"),
    ],
)
def test_l06_what_cannot_be_is_refused_with_the_numbers(wanted, numbers, job, program):
    program("mpiexec", PALS)
    with pytest.raises(UserError, match=numbers):
        launch(job("a b"), devices_per_node=4, **wanted)


def test_l06_hosts_that_stay_idle_are_pointed_out(job, program):
    program("mpiexec", PALS)
    assert launch(job("a b c d"), ranks=4, devices_per_node=4).warnings[-1].startswith("4 ranks take 1 of the 4 hosts")
    assert not any("idle" in warning for warning in launch(job("a b"), ranks=8, devices_per_node=4).warnings)


# L17, L19


def test_l17_a_job_of_four_nodes_is_never_two_ranks_here(job, program, monkeypatch):
    program("mpiexec", PALS)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    said = launch(job("a.full.name b.full.name c.full.name d.full.name"))
    assert (said.kind, said.spread.world) == ("pals", 4)


def test_l19_a_set_address_and_port_are_kept(job, program):
    program("mpiexec", PALS)
    environment = job("a b") | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4444"}
    assert setting(environment, "MASTER_ADDR") == "10.0.0.9"
    assert setting(environment, "MASTER_PORT") == "4444"
    assert setting(job("a b") | {"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR") == "a"
    with pytest.raises(UserError, match="MASTER_PORT='high'"):
        launch(job("a b") | {"MASTER_PORT": "high"})


def test_what_the_user_set_is_kept_and_said(job, program):
    program("mpiexec", PALS)
    said = launch(job("x3001 x3002") | {"NCCL_CROSS_NIC": "0"})
    assert "NCCL_CROSS_NIC" in said.kept
    assert all(each.name != "NCCL_CROSS_NIC" for each in said.settings)
    assert said.environment({"NCCL_CROSS_NIC": "0"})["NCCL_CROSS_NIC"] == "0"


def test_a_place_of_this_process_is_not_handed_to_ranks(job, program):
    program("mpirun", OPEN_MPI)
    stale = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "1", "HOME": "/me"}
    said = launch(job("a b") | stale)
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE"} == {*said.dropped}
    assert {*said.environment(stale)} & {*stale} == {"HOME"}
    assert "RANK" not in said.command


# L21, L22


def test_l21_a_missing_launcher_is_one_line_with_its_packages(job):
    with pytest.raises(UserError) as error:
        launch(job("a b"), is_dry=False)
    assert "pip install mpich" in str(error.value)
    assert "openmpi-bin" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="srun"):
        launch({"SLURM_JOB_NODELIST": "a,b"}, is_dry=False)


def test_l22_the_program_says_which_it_is(job, program):
    program("mpiexec", f'[ "$*" = --version ] || exit 1\n{OPEN_MPI}')
    said = launch(job("x3001 x3002"), is_dry=False)
    assert said.kind == "openmpi"
    assert "--cpu-bind" not in " ".join(said.command)
    assert any("polaris says pals" in warning and "openmpi 4.1.6" in warning for warning in said.warnings)
    with pytest.raises(UserError, match=r"--launcher: pals is asked for, but .* openmpi"):
        launch(job("a b"), launcher="pals")


def test_l22_the_second_name_counts_where_it_is_the_wanted_one(job, program):
    program("mpiexec", HYDRA)
    mpirun = program("mpirun", OPEN_MPI)
    assert launch(job("a b"), launcher="openmpi").command[0] == mpirun
    assert launch(job("a b")).kind == "mpich"


def test_l22_one_that_does_not_say_is_not_guessed(job, program):
    program("mpiexec", "echo something 1.0")
    with pytest.raises(UserError, match=r"does not say which MPI it is .*something"):
        launch(job("a b"))


def test_binding_is_in_the_launchers_own_words(job, program):
    program("mpiexec", PALS)
    assert "--depth=8 --cpu-bind=depth" in words(job("x3001 x3002"))
    chosen = words(job("x3001 x3002"), cpu_bind="list:0:8:16:24")
    assert "--cpu-bind list:0:8:16:24" in chosen
    assert "--depth" not in chosen
    assert "--cpu-bind=cores" in words({"SLURM_JOB_NODELIST": "a,b"}, cpu_bind="cores")
    program("mpiexec", HYDRA)
    assert "--bind-to core" in words(job("a b"), cpu_bind="core")


def test_each_task_of_slurm_gets_its_share_of_the_cores():
    environment = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_CPUS_PER_NODE": "64(x2)", "SLURM_GPUS_ON_NODE": "8"}
    assert "--cpus-per-task=8" in words(environment)
    assert "--cpus-per-task=3" in words(environment | {"SLURM_CPUS_PER_TASK": "3"})


def test_a_node_of_the_job_is_asked_for_its_devices(job, program, monkeypatch):
    program("mpiexec", PALS)
    program("nvidia-smi", "echo 'GPU 0: x'; echo 'GPU 1: x'")
    assert launch(job("a b")).spread.ranks_per_node == 1
    monkeypatch.setattr(socket, "gethostname", lambda: "b")
    assert launch(job("a b")).spread.ranks_per_node == 2
    assert launch(job("x3001 b")).spread.ranks_per_node == 2
    assert launch(job("x3001 x3002")).spread.ranks_per_node == 4


def test_a_login_node_has_no_devices(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "polaris-login-01")
    assert launch({}).spread.world == 1


def test_local_is_refused_for_other_machines():
    with pytest.raises(UserError, match="--launcher: local"):
        launch({}, hosts="a,b", launcher="local")


def test_nothing_is_written_by_preparing(job, program, tmp_path):
    program("mpiexec", HYDRA)
    before = sorted(path for path in tmp_path.rglob("*") if path.name != "nodes")
    prepare(["prog"], Request(), job("a b"), tmp_path / "logs", is_dry=False)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "nodes") == before
    assert not os.path.exists(LOGS)
