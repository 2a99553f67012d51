"""What a long sequence costs on this CPU: the memory of a training step beside `transformers`', and the loss's time.

    python benchmarks/long_sequences.py [--only memory shares loss] [--longest 65536] [--rounds 5]

One model for all: Llama, 4 layers, hidden 256, 4 heads, ffn 704, vocabulary 50304, 29 million parameters, one sequence
a step, fp32, fused AdamW. Ours recomputes blocks and takes norm and feed-forward 2,048 tokens at a time.

`memory`: a process for each length takes two steps of 64 tokens, which give the optimizer its state, and then one of
that length. Its peak is what the process then holds in all, and above what it held once everything was imported.
`shares`: the same step of 16,384 tokens on one process and on four that share the sequence. A rank's activations are
its peak less what is resident after a short step before the gradients are let go, as at the end of each step they are.
`loss`: a step of 2,048 tokens with the loss taken in chunks and with all logits at once, in turn in one process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from os import environ
from pathlib import Path
from typing import Any

from results import as_table, describe_machine, publish

LAYERS, HIDDEN, HEADS, FFN, VOCABULARY = 4, 256, 4, 704, 50304
LENGTHS = (2048, 8192, 32_768, 65_536)
SHORT, TILE, SHARED, LOSS = 64, 2048, 16_384, 2048
LEAN = ["--train.recompute", "full", "--train.tile", str(TILE)]
# A way to train: its ranks and its flags; without flags, `transformers`.
WAYS: dict[str, tuple[int, list[str] | None]] = {
    "transformers": (1, None),
    "transformers, recomputing": (1, None),
    "polarlm, nothing switched on": (1, []),
    "polarlm": (1, LEAN),
    "ring on 4 ranks": (4, [*LEAN, "--parallel.context", "4"]),
    "ulysses on 4 ranks": (4, [*LEAN, "--parallel.context", "4", "--parallel.context-method", "ulysses"]),
}
MIB = 2**20
# Bytes: the embedding's, the head's, the blocks' four and three matrices', and the norms'.
GRADIENTS = 4 * HIDDEN * (2 * VOCABULARY + LAYERS * (4 * HIDDEN + 3 * FFN + 2) + 1)

# What a step's peak is taken above, for a rank's activations.
SHARES = {
    "above_after_short_step_with_gradients": "above what a short step leaves, gradients included",
    "above_short_step": "above a short step's peak",
    "above_after_short_step": "above what a short step leaves, gradients let go",
}

Step = Callable[[int], float]  # takes one of that many tokens, and gives its loss


def polarlm_step(world: Any, flags: list[str], longest: int, loss: Any = None) -> Step:
    """Ours, as every run takes it; on several ranks with this rank's part; with another loss where one is given."""
    import torch

    from polarlm.config import load_run
    from polarlm.data import Batch
    from polarlm.parallel import Engine
    from polarlm.train import build_optimizer, train_step

    shape = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab-size": VOCABULARY}
    fields = {"model.family": "llama", **{f"model.{name}": value for name, value in shape.items()}}
    fields |= {"train.seq-len": longest, "train.steps": 1000, "parallel.ranks": world.size}
    words = [word for path, value in fields.items() for word in (f"--{path}", str(value))]
    config = load_run(None, environment={}, flags=[*words, *flags]).config
    engine = Engine(config, world)
    engine.model.loss = loss or engine.model.loss
    optimizer = build_optimizer(engine.model, config.train.optimizer)

    def step(length: int) -> float:
        ids = random_ids(length).numpy()
        batch = Batch(ids[:, :-1], ids[:, 1:], torch.arange(length)[None].numpy(), None)
        return train_step(engine, optimizer, [batch], clip=1.0).loss

    return step


def transformers_step(longest: int, recomputes: bool) -> Step:
    """`transformers.LlamaForCausalLM` in a plain loop, with the same optimizer and clipping."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        vocab_size=VOCABULARY,
        max_position_embeddings=longest,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    if recomputes:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step(length: int) -> float:
        ids = random_ids(length)[:, 1:]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def random_ids(length: int) -> Any:
    """int64 [1, S + 1]: the same for all."""
    import torch

    return torch.randint(VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(1))


def take_step(way: str, length: int, rank: int, port: int) -> None:
    """One rank of `run_way`: short steps, one long step, and what memory held."""
    import torch

    from polarlm.parallel import join_world
    from polarlm.train import train_step  # noqa: F401  (what is imported is not counted)

    if "transformers" in way:
        import transformers.models.llama.modeling_llama  # noqa: F401
    ranks, flags = WAYS[way]
    torch.ones(1, requires_grad=True).sum().backward()  # the libraries load parts of themselves at their first use
    imported = memory("VmRSS")
    with join_world(rank, ranks, rank, "127.0.0.1", port) as world:
        step = transformers_step(length, "recomputing" in way) if flags is None else polarlm_step(world, flags, length)
        step(SHORT)
        _, _, short_peak = watched(step, SHORT)
        resident = memory("VmRSS")
        loss, seconds, peak = watched(step, length)
    above = {"import": imported, "short_step": short_peak, "after_short_step": resident}
    above["after_short_step_with_gradients"] = resident + GRADIENTS
    result = {"seconds": seconds, "loss": loss, "resident": peak}
    result |= {f"above_{name}": peak - value for name, value in above.items()}
    print(json.dumps(result), flush=True)


def watched(step: Step, length: int) -> tuple[float, float, int]:
    """(loss, seconds, most bytes held) of a step."""
    Path("/proc/self/clear_refs").write_text("5")  # begin the peak anew
    start = time.perf_counter()
    loss = step(length)
    return loss, time.perf_counter() - start, memory("VmHWM")


def memory(what: str) -> int:
    """Bytes of this process, by the system's name of them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def run_way(way: str, length: int) -> dict[str, float]:
    """One step of that length in fresh processes; the largest of the ranks' numbers."""
    import socket

    print(f"{way}: {length:,} tokens", file=sys.stderr)
    ranks, _ = WAYS[way]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--process", way, str(length)]
    threads = {**environ, "OMP_NUM_THREADS": "1" if ranks > 1 else environ.get("OMP_NUM_THREADS", "2")}
    processes = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True, env=threads)
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{way} at {length:,} tokens ended with {[process.returncode for process in processes]}")
    results = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {name: max(result[name] for result in results) for name in results[0]}


def measure_memory(longest: int) -> dict[str, Any]:
    """The peak of a step, by way and length."""
    lengths = [length for length in LENGTHS if length <= longest]
    runs = [(way, length) for way in list(WAYS)[:3] for length in lengths if length <= 8192]
    runs += [("polarlm", length) for length in lengths]
    rows = [{"way": way, "length": length, **run_way(way, length)} for way, length in runs]
    ratios = {}
    for count in ("resident", "above_import"):
        peak = {(row["way"], row["length"]): row[count] for row in rows}
        for peer in ("transformers", "transformers, recomputing"):
            ratios[f"8k to {peer}, {count}"] = peak["polarlm", 8192] / peak[peer, 8192]
        if longest >= 65_536:
            ratios[f"64k to 32k, {count}"] = peak["polarlm", 65_536] / peak["polarlm", 32_768]
    return {"rows": rows, "ratios": ratios}


def measure_shares() -> dict[str, Any]:
    """The activations of a rank, by how the sequence is shared."""
    rows = [{"way": way, "length": SHARED, **run_way(way, SHARED)} for way in list(WAYS)[3:]]
    ratios = {count: {row["way"]: row[count] / rows[0][count] for row in rows} for count in SHARES}
    return {"rows": rows, "ratios": ratios}


def measure_loss(rounds: int) -> dict[str, Any]:
    """Steps with the chunked loss and with a plain one in turn, and how far the two losses' gradients are apart."""
    import torch

    from polarlm.model import CrossEntropy
    from polarlm.parallel import Device, World

    world = World(0, 1, Device(torch.device("cpu")))
    losses = {"in chunks": CrossEntropy(), "all logits at once": plain_cross_entropy()}
    steps = {name: polarlm_step(world, [], LOSS, loss) for name, loss in losses.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step(LOSS)
            if number:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    chunked, plain = (gradients(loss) for loss in losses.values())
    apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(chunked, plain, strict=True))
    ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True))
    return {"seconds": seconds, "step_to_plain_step": ratio, "gradients_apart": apart}


def plain_cross_entropy() -> Any:
    """The loss of all logits at once, by torch's own function."""
    import torch.nn.functional as F
    from torch import nn

    class PlainCrossEntropy(nn.Module):
        def forward(self, hidden, head_weight, targets):
            return F.cross_entropy((hidden @ head_weight.mT).flatten(0, 1), targets.flatten(), reduction="sum")

    return PlainCrossEntropy()


def gradients(loss: Any) -> list[Any]:
    """(loss, its gradients of the hidden states and of the head) for the same random ones."""
    import torch

    torch.manual_seed(1)
    hidden = torch.randn(1, LOSS, HIDDEN).requires_grad_()
    head = (torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5).requires_grad_()
    value = loss(hidden, head, random_ids(LOSS)[:, 1:])
    return [value, *torch.autograd.grad(value, (hidden, head))]


def describe(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    tables = []
    if "memory" in result:
        rows = [
            [
                row["way"],
                f"{row['length']:,}",
                *(f"{row[count] / MIB:,.0f}" for count in ("resident", "above_import")),
                f"{row['seconds']:.1f} s",
            ]
            for row in result["memory"]["rows"]
        ]
        tables.append(as_table(["one process", "tokens", "peak MiB", "above the import", "a step"], rows))
        tables.append(_ratios(result["memory"]["ratios"]))
    if "shares" in result:
        ratios = result["shares"]["ratios"]
        rows = [
            [row["way"], *(f"{row[count] / MIB:,.0f} ({ratios[count][row['way']]:.2f})" for count in SHARES)]
            for row in result["shares"]["rows"]
        ]
        heads = [f"a step of {SHARED:,} tokens: MiB of its peak (÷ one process's)", *SHARES.values()]
        tables.append(as_table(heads, rows))
    if "loss" in result:
        loss = result["loss"]
        rows = [[name, f"{statistics.median(taken):.2f} s"] for name, taken in loss["seconds"].items()]
        tables.append(as_table([f"loss of {LOSS:,} tokens", "a step"], rows))
        tables.append(_ratios({name: loss[name] for name in ("step_to_plain_step", "gradients_apart")}))
    return "\n\n".join(tables)


def _ratios(ratios: dict[str, float]) -> str:
    return "\n".join(f"{name.replace('_', ' ')}: {value:.3g}" for name, value in ratios.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("memory", "shares", "loss")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument(
        "--longest",
        type=int,
        choices=LENGTHS[1:],
        default=LENGTHS[-1],
        help="of memory",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the loss's steps")
    parser.add_argument("--process", nargs=4, metavar=("WAY", "LENGTH", "RANK", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        way, length, rank, port = arguments.process
        take_step(way, int(length), int(rank), int(port))
        return
    measures = {
        "memory": lambda: measure_memory(arguments.longest),
        "shares": measure_shares,
        "loss": lambda: measure_loss(arguments.rounds),
    }
    machine = describe_machine("polarlm", "torch", "transformers")
    result = {"machine": machine, **{part: measures[part]() for part in parts if part in arguments.only}}
    publish("long_sequences", result, describe(result))


if __name__ == "__main__":
    main()
