"""Train a tiny model here on all ranks, save, go on from the save, and say in one line what works.

polarlm selftest                        every device, or every node of the job this stands in
polarlm selftest --parallel.ranks 2     every field of a run is a flag: another layout, another precision

It goes the way of `polarlm train`, on text it makes up, without a network, in a folder that is removed at the end. The
resumed part must give the losses of the run that was never stopped.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TAKES_CONFIG_FLAGS = True

STEPS, SAVED_AT = 8, 4
_TEXT = "the quick brown fox jumps over the lazy dog. " * 8
_SHAPE = (
    *("--model.family", "llama", "--model.layers", "2", "--model.hidden", "64", "--model.heads", "4"),
    *("--train.seq-len", "64", "--train.micro-batch-size", "4", "--train.gradient-accumulation-steps", "1"),
    *("--train.optimizer.lr", "1e-2", "--train.schedule.warmup-steps", "0"),
)
_NOT_OURS = ("MODEL_SIZE_KEY", "DATA_FILE_LIST")  # the deck's, which would bring another model and data
_PATIENCE_S = 600
_LEAST_GAIN = 0.2  # nats; the text is learnt by heart at several times this pace
# Losses of float32 sums in another order differ by less; a moment or a sample that is not restored by far more.
_TOLERANCE = 1e-5


class _Failure(Exception):
    """What did not work, in one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing of its own; fields of a run are taken as flags."""


def run(arguments: argparse.Namespace) -> int:
    """Try it; 1, and a line that names what failed, when something does not work."""
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="polarlm-selftest-", dir=_where()) as folder:
            line = _try_everything(Path(folder), arguments.config_flags)
    except _Failure as failure:
        print(f"FAILED  {failure}")
        return 1
    print(f"ok  {line}; {time.monotonic() - start:.0f} s")
    return 0


def _where() -> Path | None:
    """The system's folder for temporary files; on several nodes the current one, which all of them share."""
    from polarlm.launch import find_allocation

    return Path.cwd() if len(find_allocation(os.environ).hosts) > 1 else None


def _try_everything(folder: Path, flags: list[str]) -> str:
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{n}: {_TEXT}"}) + "\n" for n in range(64)))
    data = ["data", "prepare", "text.jsonl", "--tokenizer", "bytes", "--output", "data", "--workers", "1"]
    _polarlm("preparing data", folder, data)
    run_flags = [*_SHAPE, "--data.paths", "data", "--train.steps", str(STEPS), "--checkpoint.every", str(SAVED_AT)]
    _polarlm("training", folder, ["train", "--name", "straight", *run_flags, *flags])
    straight = folder / "runs" / "straight"
    losses = _losses(straight, "training")
    if not losses[0] - losses[-1] > _LEAST_GAIN:
        raise _Failure(f"training: the loss does not fall, {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    difference = _difference(losses, _resumed_losses(folder, straight))
    equal = "equal to the bit" if difference == 0 else f"equal within {difference:.0e}"
    environment = json.loads((straight / "environment.json").read_text(encoding="utf-8"))
    return (
        f"{_describe(environment)}; loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps; saved at step "
        f"{SAVED_AT} and resumed there, losses {equal}"
    )


def _resumed_losses(folder: Path, straight: Path) -> list[float]:
    """The losses of the run as it goes on from where a kill after its first checkpoint would have left it."""
    cut = folder / "runs" / "cut"
    shutil.copytree(straight, cut, symlinks=True)
    if not (cut / "checkpoints" / f"step-{SAVED_AT}").is_dir():
        raise _Failure(f"saving: there is no checkpoint of step {SAVED_AT}")
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS}")
    lines = (cut / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:SAVED_AT]), encoding="utf-8")
    _polarlm("resuming", folder, ["train", str(cut), "--resume"])
    return _losses(cut, "resuming")


def _polarlm(part: str, folder: Path, words: list[str]) -> None:
    """Run a command of ours as a user would.

    Raises:
        _Failure: it fails, with the last line that it says.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    command = [sys.executable, "-m", "polarlm", *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, errors = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends its ranks too
            raise _Failure(f"{part}: no end in {_PATIENCE_S} s") from None
    if process.returncode:
        said = [line for line in (output + errors).splitlines() if line.strip()]
        last = said[-1].removeprefix("error: ") if said else f"ended with code {process.returncode}"
        raise _Failure(f"{part}: {last}")


def _losses(run: Path, part: str) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    if len(losses) != STEPS or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        raise _Failure(f"{part}: {STEPS} steps should have given as many finite losses, and gave {losses}")
    return losses


def _difference(straight: list[float], resumed: list[float]) -> float:
    """The largest of one loss to the other.

    Raises:
        _Failure: it is more than another order of sums explains.
    """
    differences = [abs(one - other) for one, other in zip(straight, resumed, strict=True)]
    if not max(differences) <= _TOLERANCE:
        step = next(number for number, each in enumerate(differences, 1) if not each <= _TOLERANCE)
        raise _Failure(
            f"resuming: step {step} gave the loss {resumed[step - 1]:.6f}, and {straight[step - 1]:.6f} in the run "
            "that was not stopped"
        )
    return max(differences)


def _describe(environment: dict[str, Any]) -> str:
    ranks, hosts = environment["layout"]["ranks"], environment["hosts"]
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{ranks} rank{'s' * (ranks > 1)} on {where}, {environment['device']}, torch {environment['torch']}"
