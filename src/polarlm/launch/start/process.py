"""One rank as a process: in a session of its own, with its log, and never outliving its end."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from polarlm.launch.machines.hosts import short_host_name
from polarlm.launch.run_folder import log_name

__all__ = ["RankProcess", "end_group"]


class RankProcess:
    """A started rank; `code` is None while it runs, then its exit code, 128 + n for a death by signal n.

    Its own session keeps a terminal's Ctrl-C from it, so that one place decides what is sent; the process group that
    comes with the session lets its children (data loaders) be ended with it.
    """

    def __init__(
        self,
        command: list[str],
        rank: int,
        log_folder: Path,
        environment: Mapping[str, str],
        listener: socket.socket | None,
    ) -> None:
        self.rank = rank
        self.host = short_host_name()
        self.log = log_folder / log_name(self.host, rank)
        self.code: int | None = None
        self.ended_at = float("inf")
        with self.log.open("ab") as log:
            self._log_start = log.tell()  # a run that goes on in its folder adds to what is there
            self._reader = self.log.open("rb")  # which outlives the folder, should somebody delete that
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=log,
                start_new_session=True,
                pass_fds=[listener.fileno()] if listener else [],
            )

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; a rank that has ended takes its children with it."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code = code if code >= 0 else 128 - code
            self.ended_at = time.monotonic()
            end_group(self.pid)
        return self.code

    def send(self, number: int) -> None:
        """Send a signal to the rank itself, if it still runs; its children are its own to tell."""
        if self.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill what is left of it, wait for that, and let go of its log."""
        if self.poll() is None:
            end_group(self.pid)
            self._process.wait()
        self._reader.close()

    def logged(self) -> list[str]:
        """Lines this rank wrote to its log since it started."""
        self._reader.seek(self._log_start)
        return self._reader.read().decode(errors="replace").splitlines()


def end_group(group: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter is macOS's word for a dead group
        os.killpg(group, signal.SIGKILL)
