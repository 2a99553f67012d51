"""The ranks of one machine: plain processes that start together, and end together whatever happens."""

import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.start.blame import choose_cause, explain, explain_hang, hangs
from polarlm.launch.start.process import RankProcess
from polarlm.launch.start.watcher import caught_signals, guarded

__all__ = ["LISTEN_FD", "check_environment", "run_local"]

# Rank 0 finds under this name a socket that listens on MASTER_PORT, for `TCPStore(master_listen_fd=...)`.
LISTEN_FD = "POLARLM_LISTEN_FD"

POLL_S = 0.05
CAUSE_WINDOW_S = 1.0  # ranks that fail this soon after the first may be the cause as well as it
GRACE_S = 5.0  # from SIGTERM to SIGKILL, once a rank has failed


def run_local(
    command: list[str],
    ranks: int,
    log_folder: Path,
    environment: Mapping[str, str],
    *,
    takes_socket: bool = True,
) -> int:
    """Run `command` as `ranks` processes of this machine, and return when none of them, nor of their children, is left.

    Rank 0 writes to this process's standard output. Every rank's standard error, and the other ranks' output, goes to
    `log_folder/<host>.<rank>.log`. A rank that fails ends the others, and the end of its log is shown. SIGTERM and
    SIGUSR1 are passed on; Ctrl-C asks the ranks to stop with SIGTERM, a second one ends them at once.

    Args:
        takes_socket: rank 0 meets the others on the socket that LISTEN_FD names; other programs than ours listen on
            MASTER_PORT themselves, which is only kept free for them.

    Returns:
        0 when every rank returned 0; else the code of the rank that failed first, 128 + n for a death by signal n;
        130 after a second Ctrl-C, or after one that met a rank before it could save.

    Raises:
        UserError: MASTER_ADDR is not an address of this machine, or MASTER_PORT no port.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    started: list[RankProcess] = []
    with caught_signals() as arrived, guarded() as guard_input:
        try:
            for process in _start(command, ranks, log_folder, environment, takes_socket):
                started.append(process)
                guard_input.write(f"{process.pid}\n")
                guard_input.flush()
            return _watch(started, arrived)
        finally:
            for process in started:
                process.end()


def check_environment(environment: Mapping[str, str]) -> None:
    """Find out now, before anything is made, whether `run_local` can use these variables.

    Raises:
        UserError: MASTER_ADDR is not an address of this machine, MASTER_PORT no port, or OMP_NUM_THREADS no number.
    """
    threads = environment.get("OMP_NUM_THREADS") or "1"
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", threads):  # OpenMP takes one number for each level of nesting
        raise UserError(
            f"OMP_NUM_THREADS={threads!r} in the environment is not a number of threads: unset it, or mend it"
        )
    held = _rendezvous(environment)[2]
    if held:
        held.close()


def _start(
    command: list[str], ranks: int, log_folder: Path, environment: Mapping[str, str], takes_socket: bool
) -> Iterator[RankProcess]:
    address, port, held = _rendezvous(environment)
    if held and takes_socket:
        held.listen(1024)
    common = {
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(max(1, _cores() // ranks)),
        "PYTHONUNBUFFERED": "1",
    }
    common.pop(LISTEN_FD, None)
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank == 0 and held and takes_socket:
            own[LISTEN_FD] = str(held.fileno())
        yield RankProcess(command, rank, log_folder, common | own, held if rank == 0 else None)
        if rank == 0 and held:
            held.close()  # rank 0 alone holds it now: should it die, the others are refused, not left waiting


def _rendezvous(environment: Mapping[str, str]) -> tuple[str, int, socket.socket | None]:
    """Return where the ranks meet: the user's own choice, or a port that is already ours, so that no other run has it.

    Raises:
        UserError: the address is not this machine's, or the port is not a number.
    """
    address = environment.get("MASTER_ADDR") or "127.0.0.1"
    port = environment.get("MASTER_PORT")
    if port:
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise UserError(f"MASTER_PORT={port!r} in the environment is not a port (1 to 65535): unset it, or mend it")
        return address, int(port), None
    # As long as nobody listens, a program that sets the same option, as torch does, may listen there in our stead.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, 0))
    except OSError as error:
        held.close()
        raise UserError(f"MASTER_ADDR={address!r} is not an address of this machine ({error}): unset it") from error
    return address, held.getsockname()[1], held


def _watch(processes: list[RankProcess], arrived: deque[int]) -> int:
    """Pass signals on and wait until all ranks have ended or one has failed; return the run's exit code."""
    asked_to_stop: set[int] = set()
    while True:
        while arrived:
            number = arrived.popleft()
            if number == signal.SIGINT and number in asked_to_stop:
                return 128 + number
            _pass_on(number, processes)
            asked_to_stop.add(number)
        codes = [process.poll() for process in processes]
        if any(codes):
            return _end_after_failure(processes, arrived, asked_to_stop)
        if None not in codes:
            return 0
        time.sleep(POLL_S)


def _pass_on(number: int, processes: list[RankProcess]) -> None:
    """Send a signal that reached us to each rank, once; Ctrl-C becomes the SIGTERM on which training saves and ends."""
    if number == signal.SIGINT:
        print("stopping: the ranks end what they can; Ctrl-C again ends them at once", file=sys.stderr)
        number = signal.SIGTERM
    for process in processes:
        process.send(number)


def _end_after_failure(processes: list[RankProcess], arrived: deque[int], asked_to_stop: set[int]) -> int:
    """Find and show the rank that failed first, end the others, and return its code."""
    _wait(processes, CAUSE_WINDOW_S, arrived)
    cause = choose_cause(processes)
    assert cause.code
    if any(hangs(process) for process in processes):
        _wait(processes, GRACE_S, arrived)  # the others' time is over at about the same moment
        print(explain_hang(processes), file=sys.stderr, flush=True)
    # A rank that dies of a signal it was sent to stop with (it was still starting) has nothing to explain.
    elif not (asked_to_stop and cause.code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)):
        print(explain(cause), file=sys.stderr, flush=True)
    for process in processes:
        process.send(signal.SIGTERM)
    _wait(processes, GRACE_S, arrived)
    died_of_ctrl_c = signal.SIGINT in asked_to_stop and cause.code == 128 + signal.SIGTERM
    return 128 + signal.SIGINT if died_of_ctrl_c else cause.code


def _wait(processes: list[RankProcess], seconds: float, arrived: deque[int]) -> None:
    """Wait until all have ended, the time is over, or a signal asks for haste."""
    deadline = time.monotonic() + seconds
    while None in [process.poll() for process in processes] and time.monotonic() < deadline and not arrived:
        time.sleep(POLL_S)


def _cores() -> int:
    """Cores this process may run on, which a scheduler may have made fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
