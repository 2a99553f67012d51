"""What sharing the work costs: a step on two ranks of one core each, beside two independent processes side by side.

    python benchmarks/scaling.py [--rounds 5] [--only NAME ...]

Every process has one thread and the same work: Llama, 8 layers, hidden 512, 8 heads, ffn 1408, vocabulary 8192, 8
sequences of 512 random tokens a step, fp32, fused AdamW, clipping. The two independent processes share nothing but the
machine, so what their step takes is what two ranks would take if communication were free. Pairs take a step in turn; a
pair's step lasts until both of its processes are done. Ratios are medians of the ratios within a round.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from os import environ
from typing import Any

from results import as_table, describe_machine, publish

LENGTH, BATCH, VOCABULARY, WARMUP = 512, 8, 8192, 1
SHAPE = {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408, "vocab-size": VOCABULARY}
# A pair: how many ranks a process's world has, and its flags.
PAIRS = {
    "independent": (1, []),
    "data parallel": (2, []),
    "zero 1": (2, ["--parallel.zero-stage", "1"]),
    "zero 2": (2, ["--parallel.zero-stage", "2"]),
    "zero 3": (2, ["--parallel.zero-stage", "3"]),
    "tensor": (2, ["--parallel.tensor", "2", "--train.micro-batch-size", str(2 * BATCH)]),
    "ring": (2, ["--parallel.context", "2", "--train.micro-batch-size", str(2 * BATCH)]),
    "ulysses": (
        2,
        ["--parallel.context", "2", "--parallel.context-method", "ulysses", "--train.micro-batch-size", str(2 * BATCH)],
    ),
    "pipeline": (
        2,
        [
            "--parallel.pipeline",
            "2",
            "--train.micro-batch-size",
            "2",
            "--train.gradient-accumulation-steps",
            str(BATCH),
        ],
    ),
}
ALONE = "independent"


class Pair:
    """Two processes that take a step whenever they are told to."""

    def __init__(self, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        command = [sys.executable, __file__, "--process", name, str(port)]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in (0, 1)
        ]
        for process in self._processes:
            _answer(process)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def step(self) -> float:
        """Seconds until both have taken one."""
        start = time.perf_counter()
        for process in self._processes:
            process.stdin.write("step\n")
            process.stdin.flush()
        for process in self._processes:
            _answer(process)
        return time.perf_counter() - start


def _answer(process: subprocess.Popen) -> dict[str, Any]:
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"a process ended early with code {process.wait()}")


def take_steps(name: str, port: int, rank: int) -> None:
    """The other end of `Pair`."""
    import torch

    from polarlm.config import load_run
    from polarlm.data import Batch
    from polarlm.parallel import Engine, join_world
    from polarlm.train import build_optimizer, train_step

    ranks, layout = PAIRS[name]
    train = {"seq-len": LENGTH, "micro-batch-size": BATCH, "steps": 1000}
    fields = {f"model.{key}": value for key, value in SHAPE.items()} | {f"train.{k}": v for k, v in train.items()}
    flags = [word for path, value in fields.items() for word in (f"--{path}", str(value))]
    config = load_run(None, environment={}, flags=[*flags, *layout, "--parallel.ranks", str(ranks)]).config
    micro, count = config.train.micro_batch_size, config.train.gradient_accumulation_steps
    with join_world(rank if ranks > 1 else 0, ranks, rank, "127.0.0.1", port) as world:
        engine = Engine(config, world)
        optimizer = build_optimizer(engine.model, config.train.optimizer)
        ids = torch.randint(VOCABULARY, (micro, LENGTH + 1), generator=torch.Generator().manual_seed(engine.data_rank))
        batch = Batch(ids[:, :-1].numpy(), ids[:, 1:].numpy(), torch.arange(LENGTH).expand(micro, -1).numpy(), None)
        for _ in range(WARMUP):
            train_step(engine, optimizer, [batch] * count, clip=1.0)
        print("{}", flush=True)
        for _ in sys.stdin:
            print(json.dumps({"loss": train_step(engine, optimizer, [batch] * count, clip=1.0).loss}), flush=True)


def measure(names: list[str], rounds: int) -> dict[str, Any]:
    """Every pair's steps, and their ratio to two independent processes'."""
    machine = describe_machine("polarlm", "torch")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        pairs = {}
        for name in names:
            print(f"getting ready: {name}", file=sys.stderr)
            pairs[name] = stack.enter_context(Pair(name))
        for _ in range(rounds):
            for name, pair in pairs.items():
                seconds[name].append(pair.step())
    results = {
        name: {
            "seconds": taken,
            "ratio": statistics.median(a / b for a, b in zip(taken, seconds[ALONE], strict=True)),
        }
        for name, taken in seconds.items()
    }
    return {"machine": machine, "pairs": results}


def describe(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    rows = [
        [name, f"{statistics.median(values['seconds']):.2f} s", f"{values['ratio']:.2f}"]
        for name, values in result["pairs"].items()
    ]
    return as_table(["two processes of one thread", "a step", "÷ two independent processes"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS), metavar="NAME")
    parser.add_argument("--process", nargs=3, metavar=("NAME", "PORT", "RANK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        name, port, rank = arguments.process
        take_steps(name, int(port), int(rank))
        return
    result = measure(list(dict.fromkeys([ALONE, *arguments.only])), arguments.rounds)
    publish("scaling", result, describe(result))


if __name__ == "__main__":
    main()
