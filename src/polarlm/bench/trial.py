"""One measurement: fresh processes, and what became of them, a crash and memory's end too."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polarlm.config import RunConfig, UserError, dump_run
from polarlm.launch import Request, prepare, run, run_local

OOM = "OOM"  # the outcome of a run that memory was not enough for
OK = "ok"


@dataclass(frozen=True)
class Task:
    """What the ranks are to do.

    Attributes:
        warmup, steps: optimizer steps that are not timed, and that are.
        memory: bytes a rank may hold of the host's memory; None is what is there.
    """

    warmup: int = 1
    steps: int = 3
    memory: int | None = None


@dataclass(frozen=True)
class Row:
    """What one layout did at one length.

    Attributes:
        outcome: `ok`, `OOM`, or what went wrong.
        numbers: of an `ok` one, as `metrics.jsonl` names them; rates are of the median step.
    """

    layout: str
    ranks: int
    seq_len: int
    outcome: str
    numbers: Mapping[str, float]

    @property
    def is_ok(self) -> bool:
        return self.outcome == OK


def try_run(layout: str, config: RunConfig, task: Task) -> Row:
    """Take a run's first steps on synthetic data, in processes of their own.

    Raises:
        UserError: the ranks cannot be started here, or one was killed.
        KeyboardInterrupt, SystemExit: this process was asked to end, by Ctrl-C or a signal.
    """
    assert config.parallel.ranks is not None
    launch = prepare([], Request(ranks=config.parallel.ranks), os.environ, Path())
    # Several hosts share the current folder, not their temporary ones.
    parent = None if launch.kind == "local" else Path.cwd()
    with tempfile.TemporaryDirectory(prefix="polarlm-bench-", dir=parent) as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump_run(config), encoding="utf-8")
        (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
        code = _run_ranks(folder, config.parallel.ranks)
        outcome, numbers = _outcome(folder, code)
    return Row(layout, config.parallel.ranks, config.train.seq_len, outcome, numbers)


def _run_ranks(folder: Path, ranks: int) -> int:
    command = [sys.executable, "-m", "polarlm.bench.rank", str(folder)]
    logs = folder / "logs"
    launch = prepare(command, Request(ranks=ranks), os.environ, logs)
    if launch.kind == "local":
        return run_local(command, ranks, logs, os.environ)
    return run(launch, logs, os.environ)


def _outcome(folder: Path, code: int) -> tuple[str, dict[str, Any]]:
    if any(folder.glob("oom.*")):
        return OOM, {}
    result = folder / "result.json"
    if code == 0 and result.exists():
        return OK, json.loads(result.read_text(encoding="utf-8"))
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1):  # we were asked to end, and the ranks with us
        raise SystemExit(code)
    if code >= 128:
        raise UserError(f"a rank was ended by signal {code - 128}")
    return f"failed: {_last_words(folder / 'logs') or f'exit code {code}'}", {}


def _last_words(logs: Path) -> str:
    """The last line of an error that a rank has logged."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(logs.glob("*.log")))
    return next((text.strip().splitlines()[-1] for text in texts if "Error" in text), "")
