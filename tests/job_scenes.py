"""Job scripts as they would be written on some machines.

python tests/job_scenes.py    writes them into launch/job_scripts/, and one of them into the document
"""

import contextlib
import io
import os
import re
import shlex
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from polarlm.cli import main

HERE = Path(__file__).parent
TEXTS = HERE / "launch" / "job_scripts"
DOCUMENT = HERE.parent / "docs" / "jobs.md"

RUN = """name: demo
model: {family: llama, layers: 1, hidden: 16, heads: 2}
train: {steps: 100, seq_len: 16, global_batch_size: 24}
checkpoint: {every: 10}
"""


@dataclass(frozen=True)
class JobScene:
    """One machine, and what is submitted there."""

    host: str
    flags: str
    environment: dict[str, str] = field(default_factory=dict)


JOB_SCENES = {
    "polaris": JobScene(
        "polaris-login-01",
        "--nodes 2 --walltime 01:00:00 --queue debug --account datascience",
        {
            "VIRTUAL_ENV": "/home/me/venv",
            "LOADEDMODULES": "craype-x86-milan:PrgEnv-nvidia/8.5.0:conda/2024-10-30-workshop",
            "MODULESHOME": "/opt/cray/pe/lmod/lmod",
            "NCCL_ALGO": "Ring,Tree",
            "SP_TYPE": "megatron",
            "MPSIZE": "2",
        },
    ),
    "perlmutter": JobScene(
        "login12",
        "--nodes 2 --walltime 06:00:00 --queue regular --account m1234 --until-done",
        {"NERSC_HOST": "perlmutter", "MODULESHOME": "/opt/cray/pe/lmod/lmod", "WANDB_API_KEY": "secret"},
    ),
    "slurm": JobScene(
        "head",
        "--scheduler slurm --nodes 3 --gpus-per-node 8 --walltime 24:00:00 --queue gpu --chain 4 --option=--gres=gpu:8",
        {"PYTHONPATH": "/home/me/two words", "HF_HOME": "line one\nline 'two'"},
    ),
    "pbs": JobScene("head", "--scheduler pbs --nodes 2 --devices-per-node 4 --walltime 00:30:00"),
}


def write_script(scene: JobScene, folder: Path) -> str:
    """What `polarlm submit --dry-run` prints there."""
    (folder / "run.yaml").write_text(RUN)
    words = ["submit", "run.yaml", *shlex.split(scene.flags), "--dry-run"]
    there = [
        mock.patch.dict(os.environ, {"PATH": str(folder), **scene.environment}, clear=True),
        mock.patch.object(socket, "gethostname", return_value=scene.host),
        mock.patch.object(sys, "executable", "/home/me/venv/bin/python"),
        mock.patch.object(sys, "argv", ["polarlm", *words]),
        contextlib.chdir(folder),
    ]
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for each in (*there, contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO())):
            stack.enter_context(each)
        assert main(words) == 0
    return said.getvalue().replace(str(folder), "/work/me")


def with_script(document: str, name: str, text: str) -> str:
    """The document with the block after `<!-- job script: NAME -->` replaced by what is written there now."""
    command = f"$ polarlm submit run.yaml {JOB_SCENES[name].flags} --dry-run"
    block = f"<!-- job script: {name} -->\n```\n{command}\n{text}```"
    return re.sub(rf"<!-- job script: {name} -->\n```\n.*?```", lambda _: block, document, flags=re.DOTALL)


if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    for name, scene in JOB_SCENES.items():
        with tempfile.TemporaryDirectory() as folder:
            text = write_script(scene, Path(folder).resolve())
        (TEXTS / f"{name}.sh").write_text(text)
        DOCUMENT.write_text(with_script(DOCUMENT.read_text(), name, text))
