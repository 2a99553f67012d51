"""Faults from within: Python imports this file first in every process of a run under test, whose path names its folder.

The variable FAULT says what goes wrong, as JSON: `act` with its arguments, in the rank `rank` (by default in each),
before it takes step `step`. FAULT_RECORD names a folder where each rank writes down what it trains on.
"""

import datetime
import errno
import fcntl
import hashlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

FAULT = json.loads(os.environ.get("FAULT", "{}"))


def _freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def _signal(number, to_launcher):
    """Send a signal, and wait until this rank has heard of it."""
    os.kill(os.getppid() if to_launcher else os.getpid(), number)
    while number == signal.SIGKILL or not signal.getsignal(signal.SIGTERM).__self__:
        time.sleep(0.01)


def _limit_files():
    """No file may grow beyond 40 KB from now on, which the system tells like a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _jump():
    """The clock is a day ahead, then a day behind, then right, from one look at it to the next."""
    hours = itertools.cycle([24, -24, 0])
    real, real_datetime = time.time, datetime.datetime

    class Jumping(real_datetime):
        @classmethod
        def now(cls, zone=None):
            return real_datetime.now(zone) + datetime.timedelta(hours=next(hours))

    time.time = lambda: real() + 3600 * next(hours)
    time.time_ns = lambda: int(time.time() * 10**9)
    for module in [*sys.modules.values()]:
        if getattr(module, "datetime", None) is real_datetime:
            module.datetime = Jumping


def _refuse_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def _refuse_folders(path, mode=0o777, **options):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


ACTS = {"freeze": _freeze, "signal": _signal, "limit files": _limit_files, "jump": _jump}


def _before(step):
    if step == FAULT.get("step") and FAULT.get("rank", int(os.environ["RANK"])) == int(os.environ["RANK"]):
        _wait_for_metrics(Path(FAULT["run"]), step - 1)
        ACTS[FAULT["act"]](**FAULT.get("arguments", {}))


def _wait_for_metrics(run, step):
    """Until the first rank has written the line of a step: so that it is known how many were taken."""
    while (run / "metrics.jsonl").read_text().count("\n") < step:
        time.sleep(0.01)


def _record(step, microbatches):
    digest = hashlib.sha256(b"".join(batch.tokens.tobytes() for batch in microbatches)).hexdigest()
    with open(Path(os.environ["FAULT_RECORD"]) / f"rank{os.environ['RANK']}", "a") as file:
        file.write(f"{step} {digest}\n")


def _watch_steps():
    """Look on whenever a rank asks for the data of a step."""
    from polarlm.data import Loader
    from polarlm.train import speed

    # The peak of this machine is not measured at every start.
    speed._measured_tflops = lambda device: 0.05
    begin, take = Loader.__init__, Loader.__next__

    def begin_at(self, samples, *, global_batch_size, start_sample, **options):
        self.step = start_sample // global_batch_size
        begin(self, samples, global_batch_size=global_batch_size, start_sample=start_sample, **options)

    def take_next(self):
        microbatches = take(self)
        self.step += 1
        _before(self.step)
        _record(self.step, microbatches)
        return microbatches

    Loader.__init__, Loader.__next__ = begin_at, take_next


if "RANK" in os.environ:
    _watch_steps()
    if FAULT.get("act") == "refuse folders":
        os.mkdir = _refuse_folders
elif FAULT.get("act") == "refuse locks":
    fcntl.flock = _refuse_locks
