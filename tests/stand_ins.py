"""Stand-ins for programs of a supercomputer, put on the PATH."""

import os
import sys

__all__ = ["put_srun"]

# Starts its tasks here, each node with a TMPDIR of its own; a node of `DEAD` starts nothing, and does not matter.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = next(n for n, word in enumerate(sys.argv) if n and not word.startswith("--"))
tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
def task(rank):
    own = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each, "SLURM_STEP_ID": 0,
           "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": f"{{each}}(x{{tasks // each}})",
           "TMPDIR": os.path.join(os.environ["NODES"], str(rank // each))}}
    os.makedirs(own["TMPDIR"], exist_ok=True)
    return subprocess.Popen(sys.argv[start:], env=os.environ | {{name: str(value) for name, value in own.items()}})
running = [task(rank) for rank in range(tasks) if str(rank // each) not in os.environ["DEAD"].split(",")]
sys.exit(max(abs(process.wait()) for process in running))
"""


def put_srun(folder, monkeypatch, nodes, dead=""):
    """Be in a job of these nodes; `folder/nodes/<number>` is each one's own folder for temporary files."""
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(SRUN)
    (folder / "bin" / "srun").chmod(0o755)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_ID": "1000",
        "NODES": str(folder / "nodes"),
        "DEAD": dead,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
