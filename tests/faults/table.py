"""What can befall a run, and what becomes of it then: the table of docs/reliability.md.

Each fault befalls a run of 15 steps on two ranks that is saved at steps 5 and 10, and has come that far.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from signal import Signals

from faults.small_run import SmallRun, assert_no_process_left, write_text
from polarlm.launch import lock

STEPS, EVERY, RANKS = 15, 5, 2
IN_STEP = 13  # when it comes from within


@dataclass(frozen=True)
class Outcome:
    """What is measured of a fault."""

    happened: str
    steps_lost: str
    data_lost: str = "none"  # samples left out or trained on twice, measured as the straight run's end to the bit


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and what is to come of it.

    Attributes:
        name: as a reader of the documentation looks for it.
        bring: brings it about, and tells what the run said to it before it goes on.
        expected: what must be measured.
    """

    name: str
    bring: Callable[[SmallRun], str]
    expected: Outcome


def ended(run: SmallRun, *words: str, **options) -> str:
    """Go on with `polarlm train`; how it ended, with the line that it said. A user's mistake is one line alone."""
    result = run.train("--resume", *words, **options)
    assert_no_process_left(run.home)
    assert "Traceback" not in result.stderr, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if result.returncode == 2:
        assert len(result.stderr.splitlines()) == 1, result.stderr
    if result.returncode == 0:
        assert not said
        said = [line for line in result.stdout.splitlines() if "asked to stop" in line]
    if result.returncode < 0:
        return f"{Signals(-result.returncode).name}, and no rank is left"
    line = f': "{run.plain(said[-1].removeprefix("error: "))}"' if said else ""
    return f"exit {result.returncode}{line}"


def signalled(number: int, to_launcher: bool) -> Callable[[SmallRun], str]:
    """A signal to the launcher, or to one rank alone."""
    arguments = {"number": number, "to_launcher": to_launcher}
    rank = 0 if to_launcher else 1
    fault = {"act": "signal", "rank": rank, "step": IN_STEP, "arguments": arguments}
    return lambda run: ended(run, fault=fault)


def launcher_killed(run: SmallRun) -> str:
    """No rank outlives it, and the lock that it could not give back keeps nobody out."""
    arguments = {"number": 9, "to_launcher": True}
    told = ended(run, fault={"act": "signal", "rank": 0, "step": IN_STEP, "arguments": arguments})
    assert json.loads((run.folder / "lock").read_text())["pid"]
    with lock.hold(run.folder):
        return told


def disk_full(run: SmallRun) -> str:
    """A file system of its own, with room for two and a half checkpoints."""
    if not MOUNTS:
        # A limit on the size of files stands for the disk; the system gives it another name.
        told = ended(run, fault={"act": "limit files", "step": IN_STEP})
        return told.replace("File too large", "No space left on device")
    saved = _bytes(run.folder / "checkpoints/step-10")
    size = _bytes(run.folder) + saved // 2
    script = f"""
        mkdir small kept
        mount -t tmpfs -o size={size} tmpfs small
        cp -a runs/. small
        mount --bind small runs
        set +e
        "$@"
        code=$?
        cp -a small/. kept
        exit $code"""
    told = ended(run, within=[*MOUNTS, "sh", "-ec", script, "sh"])
    shutil.rmtree(run.home / "runs")
    (run.home / "kept").rename(run.home / "runs")
    return told


def checkpoints_read_only(run: SmallRun) -> str:
    if not MOUNTS:
        return ended(run, fault={"act": "refuse folders"})
    return ended(run, within=_read_only("runs/run/checkpoints"))


def run_read_only(run: SmallRun) -> str:
    if MOUNTS:
        return ended(run, within=_read_only("runs/run"))
    (run.folder / "lock").mkdir()
    told = ended(run)
    (run.folder / "lock").rmdir()
    return told.replace("Is a directory", "Read-only file system")


def _read_only(path: str) -> list[str]:
    script = f'mount --bind {path} {path}; mount -o remount,ro,bind {path}; exec "$@"'
    return [*MOUNTS, "sh", "-ec", script, "sh"]


def _mounts() -> list[str]:
    """The command in which one may mount, or none."""
    for command in (["unshare", "-m"], ["unshare", "-Urm"]):
        trial = [*command, "sh", "-c", "mount -t tmpfs tmpfs /mnt && mount -o remount,ro,bind /mnt"]
        try:
            if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    return []


MOUNTS = _mounts()


def _bytes(folder: Path) -> int:
    """What the files in a folder take on a disk of pages of 4096 bytes."""
    return sum(4096 * (1 + path.stat().st_size // 4096) for path in folder.rglob("*"))


def damaged(damage: Callable[[Path], None]) -> Callable[[SmallRun], str]:
    """Something is done to the newest checkpoint."""

    def bring(run: SmallRun) -> str:
        damage(run.folder / "checkpoints/step-10")
        return ""

    return bring


def shard_of(folder: Path) -> Path:
    return min(folder.glob("weights/*.safetensors"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def point_latest_to_nothing(folder: Path) -> None:
    latest = folder.parent / "latest"
    latest.unlink()
    latest.symlink_to("step-99")


def leave_half_a_save(folder: Path) -> None:
    partial = shutil.copytree(folder, folder.with_name(".step-15.partial"))
    (partial / "complete.json").unlink()


def every_one_damaged(run: SmallRun) -> str:
    shards = [shard_of(folder) for folder in (run.folder / "checkpoints").glob("step-*")]
    for shard in shards:
        flip_a_byte(shard)
    told = ended(run)
    for shard in shards:
        flip_a_byte(shard)
    return told


def data_replaced(run: SmallRun) -> str:
    write_text(run.text, seed=1)
    try:
        return ended(run)
    finally:
        write_text(run.text)


HOLDER = """
import sys, time
from pathlib import Path
from polarlm.launch import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def second_job(run: SmallRun) -> str:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run.folder)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            return ended(run)
        finally:
            holder.kill()


def job_on_another_host(run: SmallRun) -> str:
    holder = {"host": "node2", "pid": 4711, "since": "2026-01-01T00:00:00+00:00"}
    (run.folder / "lock").write_text(json.dumps(holder))
    told = ended(run, fault={"act": "refuse locks"})
    (run.folder / "lock").unlink()
    return told


def hung(run: SmallRun) -> str:
    return ended(run, "--train.step-timeout", "12", fault={"act": "freeze", "rank": 1, "step": IN_STEP})


def clock_jumps(run: SmallRun) -> str:
    told = ended(run, fault={"act": "jump", "step": IN_STEP})
    times = [datetime.fromisoformat(event["time"]) for event in run.events()]
    assert max(times) - min(times) > timedelta(hours=23)
    return told


_PASSED_OVER = '"runs/run/checkpoints/step-10: passed over, {}"; goes on after step 5'
_SAVED = 'exit 0: "step 13: asked to stop by {}; saved"; goes on after step 13'
_REFUSED = 'exit 2: "{}"; goes on after step 10'

FAULTS = [
    Fault(
        "a rank dies outside a collective (SIGKILL, as when memory runs out)",
        signalled(9, to_launcher=False),
        Outcome(
            'exit 137: "rank 1 on node was ended by SIGKILL (the kernel does this when memory runs out); '
            'its log is runs/run/logs/node.1.log"; goes on after step 10',
            "2",
        ),
    ),
    Fault(
        "a rank hangs, with `train.step_timeout` set",
        hung,
        Outcome(
            'exit 1: "no rank took a step within train.step_timeout: rank 0 in this call, from that function '
            '(file:line); rank 1 did not answer; their stacks are in runs/run/logs"; goes on after step 10',
            "2",
        ),
    ),
    Fault(
        "the launcher is killed (SIGKILL), and its lock file stays behind",
        launcher_killed,
        Outcome("SIGKILL, and no rank is left; goes on after step 10", "2"),
    ),
    Fault("SIGTERM, as from a scheduler", signalled(15, to_launcher=True), Outcome(_SAVED.format("SIGTERM"), "0")),
    Fault(
        "SIGUSR1, as before a walltime's end", signalled(10, to_launcher=True), Outcome(_SAVED.format("SIGUSR1"), "0")
    ),
    Fault("Ctrl-C (SIGINT)", signalled(2, to_launcher=True), Outcome(_SAVED.format("SIGTERM"), "0")),
    Fault("SIGTERM to one rank alone", signalled(15, to_launcher=False), Outcome(_SAVED.format("another rank"), "0")),
    Fault(
        "the disk is full in a save",
        disk_full,
        Outcome(
            _REFUSED.format(
                "runs/run/checkpoints: step 15 cannot be saved (No space left on device); mend that, and go on with "
                "--resume from step 10"
            ),
            "5",
        ),
    ),
    Fault(
        "the checkpoints' folder is read-only",
        checkpoints_read_only,
        Outcome(
            _REFUSED.format(
                "runs/run/checkpoints: cannot be written (Read-only file system); mend that, and go on with --resume"
            ),
            "0",
        ),
    ),
    Fault(
        "the run's folder is read-only",
        run_read_only,
        Outcome(
            _REFUSED.format("runs/run: cannot be written (Read-only file system); make it writable to train there"), "0"
        ),
    ),
    Fault(
        "a shard is cut short",
        damaged(lambda folder: cut(shard_of(folder))),
        Outcome(_PASSED_OVER.format("weights/a-shard has M bytes, not the N that were written"), "5"),
    ),
    Fault(
        "a shard is empty",
        damaged(lambda folder: os.truncate(shard_of(folder), 0)),
        Outcome(_PASSED_OVER.format("weights/a-shard has 0 bytes, not the N that were written"), "5"),
    ),
    Fault(
        "a byte of a shard is flipped",
        damaged(lambda folder: flip_a_byte(shard_of(folder))),
        Outcome(_PASSED_OVER.format("weights/a-shard has other bytes than were written"), "5"),
    ),
    Fault(
        "the mark is missing, and `latest` points there",
        damaged(lambda folder: (folder / "complete.json").unlink()),
        Outcome(_PASSED_OVER.format("complete.json is missing, so it was not written to its end"), "5"),
    ),
    Fault("`latest` points to nothing", damaged(point_latest_to_nothing), Outcome("goes on after step 10", "0")),
    Fault(
        "a save was broken off half-way",
        damaged(leave_half_a_save),
        Outcome(
            '"runs/run/checkpoints/.step-15.partial: passed over, its saving was interrupted"; goes on after step 10',
            "0",
        ),
    ),
    Fault(
        "every checkpoint is damaged",
        every_one_damaged,
        Outcome(
            _REFUSED.format(
                "runs/run/checkpoints: none of the checkpoints there (step-5, step-10) is as it was written; bring "
                "one back, or move them away to begin again"
            ),
            "0",
        ),
    ),
    Fault(
        "other data under the same name",
        data_replaced,
        Outcome(
            _REFUSED.format(
                "data.paths: data/text: the run was trained on data with digest {...}, and finds {...}; bring the old "
                "data back, or start a new run with train.init_from"
            ),
            "0",
        ),
    ),
    Fault(
        "a second job on the same run",
        second_job,
        Outcome(
            _REFUSED.format("runs/run: process 4711 on node (since 12:00) trains in it; wait for it, or end it first"),
            "0",
        ),
    ),
    Fault(
        "a job on another host holds the run, and the file system has no locks",
        job_on_another_host,
        Outcome(
            _REFUSED.format("runs/run: process 4711 on node2 (since 12:00) trains in it; wait for it, or end it first"),
            "0",
        ),
    ),
    Fault(
        "the clock jumps a day ahead and a day back, at every look at it",
        clock_jumps,
        Outcome("trains on to its end; exit 0", "0"),
    ),
]
