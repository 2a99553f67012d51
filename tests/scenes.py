"""Machines as they would look from their first node: environments, node files, stand-ins for programs on the PATH.

    python tests/scenes.py    writes what `polarlm launch --dry-run` says on each into launch/dry_runs/ and the document

No such machine is here: the environments and the programs' answers are made up after the machines' own documentation.
"""

import contextlib
import importlib
import io
import os
import re
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from polarlm.cli import main

HERE = Path(__file__).parent
TEXTS = HERE / "launch" / "dry_runs"
DOCUMENT = HERE.parent / "docs" / "launching.md"

PALS = "echo 'mpiexec version 1.3.4, revision 0000000'"
HYDRA = "printf 'HYDRA build details:\\n    Version:                                 4.2.1\\n'"
OPEN_MPI = "printf 'mpirun (Open MPI) 4.1.6\\n\\nReport bugs to http://www.open-mpi.org/community/help/\\n'"
FOUR_A100 = 'for n in 0 1 2 3; do echo "GPU $n: NVIDIA A100-SXM4-40GB (UUID: GPU-$n)"; done'


@dataclass(frozen=True)
class Scene:
    """One machine; `nodes` are the lines of its node file."""

    host: str
    flags: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    programs: dict[str, str] = field(default_factory=dict)


def _polaris(*nodes: str) -> tuple[str, ...]:
    return tuple(f"{node}.hsn.cm.polaris.alcf.anl.gov" for node in nodes)


SCENES = {
    "laptop": Scene("laptop", flags="--ranks 2"),
    "polaris": Scene(
        "x3001c0s7b0n0",
        environment={
            "PBS_NODEFILE": "/var/spool/pbs/aux/1000",
            "PBS_JOBID": "1000.polaris-pbs-01",
            "LOADEDMODULES": "craype-x86-milan:PrgEnv-nvidia/8.5.0:conda/2024-10-30-workshop",
            "VIRTUAL_ENV": "/home/me/venv",
        },
        nodes=_polaris("x3001c0s7b0n0", "x3001c0s7b1n0"),
        programs={"mpiexec": PALS, "nvidia-smi": FOUR_A100},
    ),
    "aurora": Scene(
        "x4102c0s0b0n0",
        environment={"PBS_NODEFILE": "/var/spool/pbs/aux/1000", "PBS_JOBID": "1000.aurora-pbs-0001"},
        nodes=("x4102c0s0b0n0.hsn.cm.aurora.alcf.anl.gov", "x4102c0s1b0n0.hsn.cm.aurora.alcf.anl.gov"),
        programs={"mpiexec": PALS},
    ),
    "thetagpu": Scene(
        "thetagpu01",
        environment={
            "COBALT_NODEFILE": "/var/tmp/cobalt.77",
            "COBALT_JOBID": "77",
            "LOADEDMODULES": "openmpi/4.1.6:conda/2023-01-11",
            "CONDA_PREFIX": "/lus/theta-fs0/software/thetagpu/conda/2023-01-11",
            "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
            "MKLROOT": "/opt/intel/mkl",
            "HOSTNAME": "thetagpu01",
        },
        nodes=("thetagpu01", "thetagpu02"),
        programs={"mpirun": OPEN_MPI},
    ),
    "perlmutter": Scene(
        "nid001012",
        environment={
            "NERSC_HOST": "perlmutter",
            "SLURM_JOB_ID": "1000",
            "SLURM_JOB_NODELIST": "nid[001012-001013]",
            "SLURM_JOB_CPUS_PER_NODE": "128(x2)",
            "SLURM_GPUS_PER_NODE": "4",
        },
        programs={"srun": "echo slurm 23.02.7"},
    ),
    "frontier": Scene(
        "frontier00001",
        environment={"SLURM_JOB_ID": "1000", "SLURM_JOB_NODELIST": "frontier[00001-00002]"},
        programs={"srun": "echo slurm 23.02.7"},
    ),
    "slurm": Scene(
        "gpu03",
        environment={
            "SLURM_JOB_ID": "1000",
            "SLURM_JOB_NODELIST": "gpu[03,07]",
            "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
            "SLURM_GPUS_ON_NODE": "8",
        },
        programs={"srun": "echo slurm 23.02.7"},
    ),
    "slurm-torchrun": Scene(
        "gpu03",
        flags="--launcher torchrun",
        environment={"SLURM_JOB_ID": "1000", "SLURM_JOB_NODELIST": "gpu[03,07]", "SLURM_GPUS_ON_NODE": "8"},
        programs={"srun": "echo slurm 23.02.7"},
    ),
    "pbs-mpich": Scene(
        "node1",
        flags="--gpus-per-node 4",
        environment={"PBS_NODEFILE": "/var/spool/pbs/aux/1000", "PBS_JOBID": "1000.server"},
        nodes=("node1", "node1", "node2", "node2", "node1", "node2"),
        programs={"mpiexec": HYDRA},
    ),
    "openmpi": Scene("a", flags="--hosts a:2,b:2", environment={"MASTER_PORT": "23456"}, programs={"mpirun": OPEN_MPI}),
}


def dry_run(scene: Scene, folder: Path) -> str:
    """What `polarlm launch --dry-run` says there; `folder` stands for the machine's files."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in scene.programs.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {"PATH": str(programs), **scene.environment}
    if scene.nodes:
        (folder / "nodes").write_text("\n".join(scene.nodes) + "\n")
        name = next(name for name in environment if name.endswith("NODEFILE"))
        environment[name] = str(folder / "nodes")
    there = [
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(socket, "gethostname", return_value=scene.host),
        mock.patch.object(socket, "getaddrinfo", _addresses),
        mock.patch.object(
            importlib.import_module("polarlm.launch.start.prepare"), "free_port", lambda first=0: first or 23457
        ),
        mock.patch.object(os, "geteuid", return_value=1000),
        mock.patch.object(sys, "executable", "python"),
        contextlib.chdir(folder),
    ]
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for each in there:
            stack.enter_context(each)
        stack.enter_context(contextlib.redirect_stdout(said))
        assert main(["launch", "--dry-run", *scene.flags.split(), "--", "python", "my_training.py"]) == 0
    text = said.getvalue().replace(str(folder / "nodes"), next(iter(_node_files(scene)), ""))
    return text.replace(f"{programs}/", "").replace(str(folder), "/work/me")


def _node_files(scene: Scene) -> list[str]:
    return [value for name, value in scene.environment.items() if name.endswith("NODEFILE")]


def _addresses(host, *_):
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1" if host == "localhost" else "10.0.0.1", 0))]


def with_dry_runs(document: str, texts: dict[str, str]) -> str:
    """The document with each block after `<!-- dry run: NAME -->` replaced by what is said there now."""

    def block(match: re.Match) -> str:
        scene = SCENES[match["name"]]
        flags = f" {scene.flags}" if scene.flags else ""
        command = f"$ polarlm launch --dry-run{flags} -- python my_training.py"
        return f"<!-- dry run: {match['name']} -->\n```\n{command}\n{texts[match['name']]}```"

    return re.sub(r"<!-- dry run: (?P<name>[\w-]+) -->\n```\n.*?```", block, document, flags=re.DOTALL)


if __name__ == "__main__":
    texts = {}
    for name, scene in SCENES.items():
        with tempfile.TemporaryDirectory() as folder:
            texts[name] = dry_run(scene, Path(folder).resolve())
        (TEXTS / f"{name}.txt").write_text(texts[name])
    DOCUMENT.write_text(with_dry_runs(DOCUMENT.read_text(), texts))
