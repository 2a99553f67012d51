"""One process of a launch, between the launcher and the program: `python -m polarlm.launch.enter [...] -- PROGRAM ...`

Whatever launcher started it, the program finds torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...):
any program of torch.distributed runs under it. Its output goes where it does on one machine: the first rank's to the
launcher, the others' and all errors to `<logs>/<host>.<rank>.log`. How it ended is written down beside that (see
`endings.py`), since launchers tell less.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.hosts import short_host_name
from polarlm.launch.machines.network import interface_to, is_loopback
from polarlm.launch.run_folder import log_name
from polarlm.launch.start.endings import Ending
from polarlm.launch.start.meeting import meet
from polarlm.launch.start.ranks import Rank, rank_from

__all__ = ["environment_of"]

_PARENT = os.getppid()  # asked as early as can be: it may be gone before the program runs

WATCH_S = 2.0  # how often a rank looks whether its launcher is still there
GRACE_S = 10.0  # from SIGTERM to SIGKILL, once it is gone


def environment_of(place: Rank, environment: Mapping[str, str], per_node: bool = False) -> dict[str, str]:
    """What the program of this process finds: its place, where the ranks meet, and the interface that leads there.

    Args:
        place: with address and port, as `meet` gives it.
        per_node: the program is torchrun, one a node, which numbers the ranks itself.

    Nothing that is set already is changed, but the place.
    """
    address = place.master_addr
    interface = interface_to(address) if address and place.world > 1 and not is_loopback(address) else None
    defaults = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if per_node:
        own = {"PET_NODE_RANK": str(place.rank)}  # torchrun's variable for its --node-rank
    else:
        defaults["OMP_NUM_THREADS"] = str(_threads(place.local_world or 1))
        own = {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world),
            "LOCAL_RANK": str(place.local_rank),
        }
        if address and place.master_port:
            own |= {"MASTER_ADDR": address, "MASTER_PORT": str(place.master_port)}
        if place.local_world:
            own["LOCAL_WORLD_SIZE"] = str(place.local_world)
    unset = {name: value for name, value in defaults.items() if value and not environment.get(name)}
    return {**environment, **unset, **own}


def _threads(local_world: int) -> int:
    """This rank's share of the cores: those it is bound to, or a part of those that it and its neighbours run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_bound = allowed * local_world <= (os.cpu_count() or 1)
    return allowed if is_bound else max(1, allowed // local_world)


def main() -> int:
    """Run the program to its end, pass signals on to it, and write down how it ended."""
    parser = argparse.ArgumentParser(prog="polarlm.launch.enter")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--per-node", action="store_true")
    parser.add_argument("program", nargs="+")
    arguments = parser.parse_args()
    try:
        place = meet(rank_from(os.environ) or Rank(0, 1, 0, 1, None, None), os.environ)
        environment = environment_of(place, os.environ, arguments.per_node)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        code = _run(arguments.program, place.rank, environment, arguments.logs)
    except OSError as error:
        print(
            f"error: {arguments.logs}: cannot be written on {short_host_name()} ({error.strerror}); "
            "start where all hosts share the folder",
            file=sys.stderr,
        )
        return 2
    if code and os.environ.get("MPI_LOCALRANKID"):
        # Hydra lets the other ranks wait for ever when one ends with a code, and ends them when one dies of a signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return code


def _run(program: list[str], rank: int, environment: Mapping[str, str], logs: Path) -> int:
    host = short_host_name()
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / log_name(host, rank)
    stopping: list[int] = []
    process = None

    def stop(number: int, _frame: object) -> None:
        stopping.append(number)
        if process:
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # Launchers forward SIGUSR1 to ranks and keep SIGTERM for themselves; to programs the latter is known.
        signal.signal(number, stop)
    with path.open("ab") as log:
        ending = Ending(rank, host, path, log.tell())
        try:
            process = subprocess.Popen(program, env=environment, stdout=None if rank == 0 else log, stderr=log)
        except OSError as error:
            log.write(f"error: {program[0]}: cannot be started ({error.strerror})\n".encode())
            ending.write(2)
            return 2
    if stopping:  # while it was being started
        process.send_signal(signal.SIGTERM)
    threading.Thread(target=_end_with_launcher, args=(process,), daemon=True).start()
    code = process.wait()
    code = code if code >= 0 else 128 - code
    if code:
        ending.write(code)
    return code


def _end_with_launcher(process: subprocess.Popen) -> None:
    """End the program when what started this process is gone, however that ended: not every launcher's death tells."""
    # An orphan from the very start is the system's first process's.
    while os.getppid() == _PARENT != 1:
        time.sleep(WATCH_S)
    process.terminate()
    time.sleep(GRACE_S)
    process.kill()


if __name__ == "__main__":
    sys.exit(main())
