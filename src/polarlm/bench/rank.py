"""One rank of a measurement: `python -m polarlm.bench.rank FOLDER`, started by `trial`."""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from polarlm.bench.memory import MemoryGuard, resident_bytes
from polarlm.bench.trial import Task
from polarlm.config import RunConfig, load_run_folder
from polarlm.data import Loader, open_split
from polarlm.launch import LISTEN_FD, Rank, meet, rank_from
from polarlm.parallel import Engine, World, end_with, join_world
from polarlm.train import build_optimizer, train_step
from polarlm.train.speed import Speedometer

_PATIENCE_S = 3.0  # until a rank that ran out of memory has said so to those that lost it


def main() -> int:
    """Measure, and write `result.json`; where memory ends, leave a word of that and end quietly, with all others."""
    folder = Path(sys.argv[1])
    task = Task(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    place = meet(rank_from(os.environ) or Rank(0, 1, 0, 1, None, None), os.environ)

    def out_of_memory() -> None:
        (folder / f"oom.{place.rank}").touch()
        os._exit(0)

    config = load_run_folder(folder)
    listen_fd = os.environ.get(LISTEN_FD)
    address, port = place.master_addr or "127.0.0.1", place.master_port or 0
    MemoryGuard(task.memory, out_of_memory).start()
    try:
        with join_world(
            place.rank, place.world, place.local_rank, address, port, int(listen_fd) if listen_fd else None
        ) as world:
            result = measure(config, task, world)
            if world.is_first:
                (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    except (torch.OutOfMemoryError, MemoryError):
        out_of_memory()
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or _another_ran_out(folder):
            out_of_memory()
        raise
    return 0


def measure(config: RunConfig, task: Task, world: World) -> dict[str, Any]:
    """The rates of the median of the timed steps, and the most memory that any rank held; on every rank."""
    before = resident_bytes()
    engine = Engine(config, world)
    offloads = config.parallel.offload == "optimizer"
    optimizer = build_optimizer(engine.model, config.train.optimizer, in_host_memory=offloads)
    samples = open_split(config.data, config.train.seq_len, config.seed, "train", config.model.vocab_size)
    speedometer = Speedometer(config, world.device)
    seconds = []
    with Loader(
        samples,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=engine.data_rank,
        ranks=engine.data_ranks,
        start_sample=0,
        mask_documents=config.data.mask_documents,
    ) as loader:
        for _, microbatches in zip(range(task.warmup + task.steps), loader, strict=False):
            world.barrier()
            start = time.perf_counter()
            result = train_step(engine, optimizer, microbatches, clip=config.train.optimizer.clip)
            world.device.synchronize()
            world.barrier()
            seconds.append(time.perf_counter() - start)
    peaks = world.gather((world.device.peak_memory_bytes(), before))
    rates = speedometer.measure(statistics.median(seconds[task.warmup :]))
    is_cpu = world.device.torch.type == "cpu"
    return {
        **rates,
        "loss": result.loss,
        "peak_memory_bytes": max(peak for peak, _ in peaks),
        # On a CPU the libraries are in it, too.
        "peak_memory_above_start_bytes": max(peak - before * is_cpu for peak, before in peaks),
    }


def _another_ran_out(folder: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if any(folder.glob("oom.*")):
            return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    end_with(main)
