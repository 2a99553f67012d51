"""What a checkpoint costs: bytes a second to the disk, the wait of training, and loading under another layout.

    python benchmarks/checkpoint.py [--gigabytes 2] [--rounds 5] [--folder .]

Two ranks of one thread under ZeRO-3 hold a Llama of that many bytes (weights and AdamW's two moments, fp32). In each
round, in turn and on the same disk:

1. one process writes as many random bytes into one file, front to back, and waits for the disk (`fsync`);
2. one process gives the same tensors, whole, to `torch.save`, and waits for the disk;
3. both ranks save a checkpoint, and wait until it is complete: the disk, SHA-256 of every file, the mark;
4. both ranks save one in the background, and the time until training could go on is taken;
5. a model takes it in under the same layout, and one under tensor parallelism of two, each at its fastest of two.

Ratios are medians of the ratios within a round; the first round, which makes the buffers, does not count.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

from results import as_table, describe_machine, publish

HIDDEN, FFN, VOCABULARY = 1024, 2816, 8192
LAYOUTS = {"zero 3": ["--parallel.zero-stage", "3"], "tensor": ["--parallel.tensor", "2"]}


def flags_of(layers: int, layout: str) -> list[str]:
    shape = {"family": "llama", "layers": layers, "hidden": HIDDEN, "heads": 8, "ffn": FFN, "vocab-size": VOCABULARY}
    model = [word for name, value in shape.items() for word in (f"--model.{name}", str(value))]
    return [*model, "--train.seq-len", "64", "--train.steps", "10", "--parallel.ranks", "2", *LAYOUTS[layout]]


def layers_for(total_bytes: float) -> int:
    """How many layers make a state of about that many bytes."""
    from polarlm.config import load_run
    from polarlm.plan import count_parameters

    one, two = (
        count_parameters(load_run(None, environment={}, flags=flags_of(n, "zero 3")).config.model) for n in (1, 2)
    )
    return max(1, round((total_bytes / 12 - one) / (two - one)) + 1)


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(path: Path, size: int) -> None:
    chunk = memoryview(os.urandom(64 << 20))
    with path.open("wb") as file:
        for start in range(0, size, len(chunk)):
            file.write(chunk[: size - start])
        file.flush()
        os.fsync(file.fileno())


def save_as_torch_does(path: Path, tensors: object) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def measure_on_a_rank(folder: Path, layers: int, rounds: int, port: int, rank: int) -> None:
    """What each of the two ranks does; the first prints a line of JSON a round."""
    import torch

    from polarlm.checkpoint import Checkpoints
    from polarlm.config import load_run
    from polarlm.parallel import Engine, join_world
    from polarlm.train import build_optimizer

    def ready(layout: str) -> tuple[Any, Any]:
        """A model and an optimizer whose state is full of numbers."""
        config = load_run(None, environment={}, flags=flags_of(layers, layout)).config
        model = Engine(config, world).model
        optimizer = build_optimizer(model, config.train.optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def remove(path: Path) -> None:
        """Let its pages of the system's cache be the next ones to be filled: fresh ones cost a virtual machine dear."""
        if world.is_first:
            path.unlink()

    def settle() -> None:
        """What was written or deleted before is not to be waited for in what is measured next."""
        if world.is_first:
            os.sync()
        world.barrier()

    def both(action: Callable[[], object]) -> float:
        """Seconds until both ranks are done, from a disk at rest."""
        settle()
        return seconds_of(lambda: (action(), world.barrier()))

    def alone(action: Callable[[], object]) -> float:
        """Seconds of what the first rank does while the other waits, from a disk at rest."""
        settle()
        seconds = seconds_of(action) if world.is_first else 0.0
        world.barrier()
        return seconds

    with join_world(rank, 2, rank, "127.0.0.1", port) as world:
        states = {layout: ready(layout) for layout in LAYOUTS}
        model, optimizer = states["zero 3"]
        size = 12 * sum(parameter.numel() for parameter in model.parameters())
        whole = [torch.randn(size // 12) for _ in range(3)] if world.is_first else []
        waiting = Checkpoints(folder / "waiting", 1, world)
        behind = Checkpoints(folder / "behind", 1, world, in_background=True)

        def take_round(step: int) -> dict[str, Any]:
            row: dict[str, Any] = {"bytes": size}
            row["plain write"] = alone(lambda: write_plainly(folder / "plain", size))
            remove(folder / "plain")
            row["torch.save"] = alone(lambda: save_as_torch_does(folder / "whole.pt", whole))
            remove(folder / "whole.pt")
            row["save"] = both(lambda: waiting.save(step, model, optimizer, {}))
            row["wait of a save in the background"] = both(lambda: behind.save(step, model, optimizer, {}))
            behind.wait()
            for layout, state in states.items():
                load = partial(behind.load, step, *state)
                row[f"load under {layout}"] = min(both(load) for _ in range(2))
            return row

        for step in range(1, rounds + 2):
            row = take_round(step)
            if world.is_first:
                print(json.dumps(row), flush=True)


def measure(gigabytes: float, rounds: int, parent: Path) -> dict[str, Any]:
    machine = describe_machine("polarlm", "torch")
    layers = layers_for(gigabytes * 1e9)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=parent))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--rank", str(folder), str(layers), str(rounds), str(port)]
    try:
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, text=True, env={**environ, "OMP_NUM_THREADS": "1"}
            )
            for rank in (0, 1)
        ]
        rows = [json.loads(line) for line in ranks[0].stdout if line.startswith("{")]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("a rank failed")
    finally:
        shutil.rmtree(folder)
    return {"machine": machine, "layers": layers, "rounds": rows[1:]}


def describe(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""

    def median(name: str, divided_by: str | None = None) -> float:
        return statistics.median(row[name] / (row[divided_by] if divided_by else 1) for row in result["rounds"])

    size = result["rounds"][0]["bytes"]

    def rate(name: str) -> str:
        return f"{median(name):.2f} s, {size / median(name) / 1e6:,.0f} MB/s"

    rows = [
        ["one process writes as many bytes, with fsync", rate("plain write"), ""],
        ["`torch.save` on one process, with fsync", rate("torch.save"), ""],
        [
            "two ranks save, with fsync and digests",
            rate("save"),
            f"{1 / median('save', 'plain write'):.2f} x the plain write's bytes a second",
        ],
        [
            "training waits for a save in the background",
            f"{median('wait of a save in the background'):.2f} s",
            f"{median('wait of a save in the background', 'torch.save'):.3f} x the time of `torch.save`",
        ],
        ["load under the same layout (ZeRO-3)", rate("load under zero 3"), ""],
        [
            "load under another (tensor parallel)",
            rate("load under tensor"),
            f"{median('load under tensor', 'load under zero 3'):.2f} x the same layout's time",
        ],
    ]
    return as_table([f"{size / 1e9:.2f} GB on two ranks", "median", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument(
        "--rank", nargs=5, metavar=("FOLDER", "LAYERS", "ROUNDS", "PORT", "RANK"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.rank:
        folder, *numbers = arguments.rank
        measure_on_a_rank(Path(folder), *map(int, numbers))
        return
    result = measure(arguments.gigabytes, arguments.rounds, arguments.folder)
    publish("checkpoint", result, describe(result))


if __name__ == "__main__":
    main()
