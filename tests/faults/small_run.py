"""The small run that faults befall, and what it must end with whatever befalls it."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from polarlm.checkpoint import saved_checkpoints
from polarlm.config import dump_run, load_run, load_run_folder
from polarlm.data import IndexedWriter, Loader, load_tokenizer, open_split
from polarlm.data.manifest import write_manifest
from polarlm.launch import short_host_name
from polarlm.train import fit, open_run, speed
from ranks import run_ranks

RUN = """\
name: run
model: {family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, dropout: 0.1, vocab_size: 257}
data: {paths: [TEXT], tokenizer: bytes, split: [1, 0, 0]}
train:
  seq_len: 16
  micro_batch_size: 1
  global_batch_size: 8
  optimizer: {lr: 3e-3}
  schedule: {name: constant, warmup_steps: 5}
checkpoint: {keep_last: 2}
"""
SEAM = Path(__file__).parent / "seam"


def write_text(prefix: Path, seed: int = 0) -> None:
    """A dataset of 100 documents of random ids."""
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in range(100):
            writer.add_document(np.random.default_rng((seed, document)).integers(257, size=100))
    write_manifest(prefix, {})


class SmallRun:
    """A run in a folder of its own, `runs/run` there."""

    def __init__(self, home: Path, text: Path, *, steps: int, every: int, ranks: int, zero_stage: int) -> None:
        self.home, self.steps, self.every, self.ranks = home, steps, every, ranks
        self.text, self.folder = text, home / "runs/run"
        self.flags = (
            f"--train.steps {steps} --checkpoint.every {every} "
            f"--parallel.ranks {ranks} --parallel.zero-stage {zero_stage}"
        ).split()
        (home / "trained").mkdir(parents=True, exist_ok=True)
        (home / "run.yaml").write_text(RUN.replace("TEXT", str(text)))

    def environment(self, fault: Mapping[str, object] | None = None) -> dict[str, str]:
        """For the processes of the run: faults may come from within."""
        path = f"{SEAM}:{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else str(SEAM)
        own = {"PYTHONPATH": path, "FAULT_RECORD": str(self.home / "trained"), "OMP_NUM_THREADS": "1"}
        return os.environ | own | ({"FAULT": json.dumps({"run": str(self.folder)} | fault)} if fault else {})

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "polarlm", "train", "run.yaml", *self.flags, *words]

    def train(
        self, *words: str, fault: Mapping[str, object] | None = None, within: Sequence[str] = ()
    ) -> subprocess.CompletedProcess:
        """`polarlm train` to its end, inside another command if need be."""
        return subprocess.run(
            [*within, *self.command(*words)],
            cwd=self.home, env=self.environment(fault), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen:
        """`polarlm train` in the background."""
        return subprocess.Popen(
            self.command(*words),
            cwd=self.home, env=self.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def go_on(self) -> None:
        """Go on to the end, or begin, in ranks forked from the test."""
        config = load_run(self.home / "run.yaml", environment={}, flags=self.flags).config
        if not self.folder.exists():
            load_tokenizer("bytes").save(self.folder / "tokenizer")
        (self.folder / "config.yaml").write_text(dump_run(config))
        run_ranks(self.ranks, _go_on, self.home, timeout=600)

    def metrics(self) -> list[list[float]]:
        """What a step's line must say whatever befell the run."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        kept = ("step", "samples", "tokens", "loss", "grad_norm", "lr")
        return [[line[key] for key in kept] for line in map(json.loads, lines)]

    def last_step(self) -> int:
        """The last step in the metrics."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def weights(self) -> dict[str, bytes]:
        """The shards of the end, each tensor's piece by its name and shard."""
        found = {}
        for path in sorted((self.folder / f"checkpoints/step-{self.steps}").glob("*/*.safetensors")):
            with safe_open(path, "numpy") as shard:
                found |= {f"{path.name} {name}": shard.get_tensor(name).tobytes() for name in shard.keys()}  # noqa: SIM118
        return found

    def newest(self) -> int:
        """The newest complete checkpoint's step, 0 where there is none."""
        if not self.folder.is_dir():
            return 0
        return max((saved.step for saved in saved_checkpoints(self.folder) if saved.fault is None), default=0)

    def complete(self) -> list[int]:
        """The newest complete checkpoint's step, and those of others that have their mark but not their name."""
        marks = (self.folder / "checkpoints").glob(".step-*.partial/complete.json")
        return [self.newest(), *(int(mark.parent.name.split("-")[1].split(".")[0]) for mark in marks)]

    def events(self, kind: str | None = None) -> list[dict]:
        """What `events.jsonl` tells, of one kind or all."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if kind in (None, line["event"])]

    def assert_ended_as(self, straight: "SmallRun") -> None:
        """Every step's numbers and the weights and moments at the end are the straight run's to the bit, and no rank
        has ever trained on other samples than that step's."""
        assert [line[0] for line in straight.metrics()] == [*range(1, self.steps + 1)]
        assert self.metrics() == straight.metrics()
        assert straight.weights()
        assert self.weights() == straight.weights()
        self._assert_trained_on_its_samples()

    def _assert_trained_on_its_samples(self) -> None:
        config = load_run_folder(self.folder)
        samples = open_split(config.data, config.train.seq_len, config.seed, "train", config.model.vocab_size)
        sizes = {"global_batch_size": config.train.global_batch_size, "micro_batch_size": config.train.micro_batch_size}
        for path in (self.home / "trained").iterdir():
            rank = int(path.name.removeprefix("rank"))
            with Loader(samples, **sizes, rank=rank, ranks=self.ranks, start_sample=0) as loader:
                expected = {step: _digest(batches) for step, batches in zip(range(1, self.steps + 1), loader)}  # noqa: B905
            for line in path.read_text().splitlines():
                step, digest = line.split()
                assert expected[int(step)] == digest, f"rank {rank}, step {step}"

    def plain(self, line: str) -> str:
        """A line without what differs from machine to machine, and from run to run."""
        line = line.replace(f"{self.home}/", "").replace(short_host_name(), "node")
        line = re.sub(r"{.*?}", "{...}", line.replace(str(self.text), "data/text"))
        line = re.sub(r"in \w+, from \w+ \(\w+\.py:\d+\)", "in this call, from that function (file:line)", line)
        line = re.sub(r"process \d+", "process 4711", line)
        line = re.sub(r"since [\d-]+T[\d:+]+", "since 12:00", line)
        line = re.sub(r"((?:weights|optimizer)/)[^ ]+", r"\1a-shard", line)
        return re.sub(r"[1-9]\d* bytes", "M bytes", re.sub(r"bytes, not the \d+", "bytes, not the N", line))


def _go_on(world, home):
    os.chdir(home)
    speed._measured_tflops = lambda device: 0.05  # the peak of this machine is not measured at every start
    folder = Path("runs/run")
    fit(open_run(folder, load_run_folder(folder), world))


def _digest(microbatches) -> str:
    return hashlib.sha256(b"".join(batch.tokens.tobytes() for batch in microbatches)).hexdigest()


def ranks_of(launcher: int) -> list[int]:
    """Process ids of a launcher's ranks, in order."""
    found = {}
    try:
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
            found |= {int(variable[5:]): int(child) for variable in variables if variable.startswith("RANK=")}
    except (FileNotFoundError, ProcessLookupError):
        pass
    return [found[rank] for rank in sorted(found)]


def kill(pid: int) -> None:
    """Without warning, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def assert_no_process_left(home: Path, seconds: float = 15) -> None:
    """No process works in the folder any more, or it ends soon."""
    deadline = time.monotonic() + seconds
    while left := _working_in(home):
        assert time.monotonic() < deadline, f"processes left: {left}"
        time.sleep(0.02)


def _working_in(home: Path) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdecimal() and int(entry) != os.getpid() and os.readlink(f"/proc/{entry}/cwd") == str(home):
                found.append(entry)
        except OSError:
            continue
    return found
