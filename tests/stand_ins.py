"""Stand-ins for programs of a supercomputer, put on the PATH."""

import os
import sys

__all__ = ["put_srun"]

# Starts its tasks here, each node with a TMPDIR of its own, and ends all when one ends badly. Nodes of `SILENT` start
# nothing; on those of `WITHOUT_PYTHON` no Python is where the others have it.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys, time
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = next(n for n, word in enumerate(sys.argv) if n and not word.startswith("--"))
tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
def is_among(rank, name):
    return str(rank // each) in os.environ[name].split(",")
def task(rank):
    own = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each, "SLURM_STEP_ID": 0,
           "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": f"{{each}}(x{{tasks // each}})",
           "TMPDIR": os.path.join(os.environ["NODES"], str(rank // each))}}
    os.makedirs(own["TMPDIR"], exist_ok=True)
    command = sys.argv[start:]
    if is_among(rank, "WITHOUT_PYTHON"):
        command = ["/no" + word if word == sys.executable else word for word in command]
    return subprocess.Popen(command, env=os.environ | {{name: str(value) for name, value in own.items()}})
running = [task(rank) for rank in range(tasks) if not is_among(rank, "SILENT")]
codes = [None]
while None in codes and not any(codes):
    time.sleep(0.02)
    codes = [process.poll() for process in running]
if any(codes):
    for process in running:
        process.terminate()
sys.exit(max(abs(process.wait()) for process in running))
"""


def put_srun(folder, monkeypatch, nodes, silent="", without_python=""):
    """Be in a job of these nodes; `folder/nodes/<number>` is each one's own folder for temporary files.

    Args:
        silent, without_python: numbers of nodes, from 0 on, by commas.
    """
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(SRUN)
    (folder / "bin" / "srun").chmod(0o755)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_ID": "1000",
        "NODES": str(folder / "nodes"),
        "SILENT": silent,
        "WITHOUT_PYTHON": without_python,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
