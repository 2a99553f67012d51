"""A second job on a run's folder is refused; a dead holder's lock is nobody's."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from polarlm.config import UserError
from polarlm.launch import lock, short_host_name

HOLDER = """
import sys, time
from pathlib import Path
from polarlm.launch import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_job_is_told_who_holds_the_run(holder, tmp_path):
    with pytest.raises(UserError) as refusal, lock.hold(tmp_path):
        pass
    assert str(tmp_path) in str(refusal.value)
    assert f"process {holder.pid} on {short_host_name()}" in str(refusal.value)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == holder.pid


def test_a_killed_holders_lock_is_taken_over(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.hold(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with lock.hold(tmp_path):
        pass


@pytest.mark.parametrize(
    ("pid_is_ours", "host", "is_held"), [(True, None, True), (False, None, False), (False, "x", True)]
)
def test_without_locks_of_the_file_system_the_process_stands_for_it(tmp_path, monkeypatch, pid_is_ours, host, is_held):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    finished = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True
    )
    holder = {
        "host": host or short_host_name(),
        "pid": os.getpid() if pid_is_ours else int(finished.stdout),
        "since": "2026-01-01T00:00:00+00:00",
    }
    (tmp_path / "lock").write_text(json.dumps(holder))
    if is_held:
        with pytest.raises(UserError, match="trains in it"), lock.hold(tmp_path):
            pass
    else:
        with lock.hold(tmp_path):
            pass


def test_a_full_disk_does_not_keep_a_run_from_being_held(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with lock.hold(tmp_path), pytest.raises(UserError, match="another job trains in it"), lock.hold(tmp_path):
        pass
