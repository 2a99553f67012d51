"""One rank of `polarlm doctor`: which torch is here, and does an all-reduce with the others come out right?

`python -m polarlm.cli.probe FOLDER` writes torch.json, and then exchange.json, into the folder.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from polarlm.launch import LISTEN_FD, Rank, rank_from

_PATIENCE_S = 120
_CPU_BYTES, _DEVICE_BYTES = 32 << 20, 256 << 20
_ROUNDS = 3


def main() -> NoReturn:
    """Find out, write it down, and end this process; an exception or a death by SIGALRM is an answer too."""
    signal.alarm(_PATIENCE_S)  # ends this process even inside a collective that never returns
    folder, place = Path(sys.argv[1]), rank_from(os.environ)
    assert place
    about = _about_torch()
    if place.rank == 0:
        (folder / "torch.json").write_text(json.dumps(about))
    from polarlm.parallel import end_with  # not before it is known that torch can be loaded

    end_with(lambda: _try_exchange(folder, place))


def _about_torch() -> dict:
    import torch

    version = torch.version
    built_for = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else ""
    if not built_for and getattr(version, "xpu", None):
        built_for = f"XPU {version.xpu}"
    is_there = torch.accelerator.is_available()
    return {
        "torch": torch.__version__,
        "built_for": built_for,
        "torch_devices": torch.accelerator.device_count() if is_there else 0,
    }


def _try_exchange(folder: Path, place: Rank) -> int:
    rate, on = _exchange(place)
    if place.rank == 0:
        (folder / "exchange.json").write_text(json.dumps({"exchange_bytes_per_s": rate, "exchange_on": on}))
    return 0


def _exchange(place: Rank) -> tuple[float, str]:
    """(bytes that a rank sends in a second of an all-reduce, over what).

    An all-reduce of N bytes over n ranks sends 2 (n-1) / n N from each.
    """
    import torch
    import torch.distributed as dist

    from polarlm.parallel import Device, join_world

    # Two ranks on one accelerator is what no library of collectives takes.
    here = place.local_world or 1
    is_short = torch.accelerator.is_available() and torch.accelerator.device_count() < here
    device = Device(torch.device("cpu")) if is_short else None
    listen_fd = os.environ.get(LISTEN_FD)
    address = (place.master_addr or "127.0.0.1", place.master_port or 0, int(listen_fd) if listen_fd else None)
    with join_world(place.rank, place.world, place.local_rank, *address, device) as world:
        size = _CPU_BYTES if world.device.torch.type == "cpu" else _DEVICE_BYTES
        values = torch.empty(size // 4, device=world.device.torch)
        seconds = []
        for _ in range(1 + _ROUNDS):  # the first sets the connections up
            values.fill_(world.rank + 1.0)
            world.device.synchronize()
            world.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            world.device.synchronize()
            seconds.append(time.perf_counter() - start)
            expected = world.size * (world.size + 1) / 2
            if not bool((values == expected).all()):
                raise ArithmeticError(f"an all-reduce to {expected:.0f} gave {values.unique()[:4].tolist()}")
        rate = 2 * (world.size - 1) / world.size * size / min(seconds[1:])
        return rate, f"{world.device.backend}, {world.device.name}"


if __name__ == "__main__":
    main()
