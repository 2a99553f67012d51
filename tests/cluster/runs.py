"""The small runs of these tests, and what is compared of them."""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from cluster.processes import eventually
from cluster.slurm import Job
from polarlm.cli import main
from polarlm.config import load_run_folder
from polarlm.data import load_tokenizer
from polarlm.train import fit, open_run
from ranks import run_ranks

# Each microbatch is one sample, so that every number of ranks sums in an order of its own.
_RUN = """\
name: run
model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2}
data: {paths: [synthetic]}
train:
  steps: STEPS
  seq_len: 32
  micro_batch_size: 1
  global_batch_size: 4
  optimizer: {lr: 3e-3}
  eval_every: 0
"""

POLARLM = (sys.executable, "-m", "polarlm")
RANK = (sys.executable, "-m", "polarlm.cli.rank")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# First on PYTHONPATH, it makes a run last long enough to be interrupted.
SLOWLY = Path(__file__).with_name("slowly")
ALLREDUCE = (sys.executable, str(Path(__file__).with_name("allreduce.py")))


def write_run(folder: Path, steps: int, more: str = "") -> Path:
    """Write `run.yaml` into the folder, and return the folder that the run will have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(_RUN.replace("STEPS", str(steps)) + more)
    return folder / "runs" / "run"


def prepare_run(folder: Path, steps: int, ranks: int) -> Path:
    """Make the run's folder as `polarlm train` does, for ranks that something else starts."""
    run = write_run(folder, steps)
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["train", str(folder / "run.yaml"), "--show-config", "--parallel.ranks", str(ranks)]) == 0
    load_tokenizer("bytes").save(run / "tokenizer")
    (run / "config.yaml").write_text(shown.getvalue())
    return run


def train_here(folder: Path, steps: int, ranks: int) -> list[dict]:
    """The metrics of the same run in ranks forked from the test, which no launcher starts."""
    run = prepare_run(folder, steps, ranks)
    run_ranks(ranks, lambda world: fit(open_run(run, load_run_folder(run), world)))
    return metrics(run)


def metrics(run: Path) -> list[dict]:
    """What must not depend on where and how often a run was started, step by step."""
    kept = ("step", "samples", "tokens", "loss", "grad_norm", "lr")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in kept} for line in lines]


def places(folder: Path) -> list[dict]:
    """What each rank of `allreduce.py` wrote, by rank."""
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda place: place["rank"])


def wait_for_step(job: Job, run: Path, step: int) -> None:
    """Return when the job has taken that step of the run."""
    path = run / "metrics.jsonl"

    def is_taken():
        state = job.field("JobState")
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), f"job {job.number} is {state}; {said(run)}"
        return path.exists() and len(path.read_text().splitlines()) >= step

    assert eventually(is_taken, 200), said(run)


def said(run: Path) -> str:
    """What the run's jobs have written."""
    paths = [run.parents[1] / "out", *sorted(run.glob("logs/job-*.log"))]
    return "\n".join(path.read_text() for path in paths if path.exists()) or "nothing yet"
