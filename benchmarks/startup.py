"""How long it takes from the command to the first step: `polarlm train` beside a bare script that does the same.

    python benchmarks/startup.py [--rounds 5] [--ranks 1 2]

Both build the same small GPT (2 layers, hidden 64, 257 ids), draw a batch of random ids, take one AdamW step and say
so; the time runs from the start of the command to that line. `polarlm train` also reads and checks its run, makes the
run's folder, watches over the ranks and measures the machine. The bare script is as short as it can be: for one rank
`python bare.py`; for more `torchrun`, gloo and DistributedDataParallel. The two take turns; the time is the median, the
ratio the median of the ratios within a round. CPU seconds are those of all processes of a command, until it has ended.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from results import as_table, describe_machine, publish

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, BATCH = 2, 64, 4, 257, 64, 4

BARE = f"""
    import os, torch
    from torch import nn

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding({VOCABULARY}, {HIDDEN}), nn.Embedding({LENGTH}, {HIDDEN})
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    {HIDDEN}, {HEADS}, {4 * HIDDEN}, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range({LAYERS})
            )
            self.norm = nn.LayerNorm({HIDDEN})

        def forward(self, ids):
            hidden = self.tokens(ids) + self.positions.weight
            mask = nn.Transformer.generate_square_subsequent_mask({LENGTH})
            for block in self.blocks:
                hidden = block(hidden, mask, is_causal=True)
            return self.norm(hidden) @ self.tokens.weight.T

    model = GPT()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint({VOCABULARY}, ({BATCH}, {LENGTH + 1}))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if os.environ.get("RANK", "0") == "0":
        print(f"step 1 of {{parameters:,}} parameters: loss {{loss.item()}}", flush=True)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()
"""


def polarlm_command(ranks: int) -> list[str]:
    """`polarlm train` on random ids, with one step to take."""
    shape = {"family": "gpt", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab-size": VOCABULARY}
    train = {"seq-len": LENGTH, "micro-batch-size": BATCH, "steps": 1}
    fields = {f"model.{name}": value for name, value in shape.items()}
    fields |= {f"train.{name}": value for name, value in train.items()} | {"parallel.ranks": ranks}
    return [sys.executable, "-m", "polarlm", "train"] + [w for k, v in fields.items() for w in (f"--{k}", str(v))]


def bare_command(ranks: int, script: Path) -> list[str]:
    """The bare script, alone or under torchrun."""
    if ranks == 1:
        return [sys.executable, str(script)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]


def time_first_step(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds until the command's line of its first step, and the CPU seconds of all it started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first_step, said = None, []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 1") and first_step is None:
            first_step = time.perf_counter() - start
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status or first_step is None:
        raise SystemExit(f"{' '.join(command)} took no step:\n{''.join(said)}{errors}")
    parameters = next(line.split(" parameters")[0].split()[-1] for line in said if " parameters" in line)
    return {"seconds": first_step, "cpu_seconds": usage.ru_utime + usage.ru_stime, "parameters": parameters}


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """Both commands in turn, after one untimed start of each that fills the disk's cache."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        script = folder / "bare.py"
        script.write_text(textwrap.dedent(BARE))
        commands = {"polarlm": polarlm_command(ranks), "bare": bare_command(ranks, script)}
        turns = [
            {name: time_first_step(command, folder) for name, command in commands.items()} for _ in range(rounds + 1)
        ]
    sizes = {turn[name]["parameters"] for turn in turns for name in commands}
    assert len(sizes) == 1, f"the two models differ in size: {sizes}"
    result: dict[str, Any] = {"ranks": ranks, "parameters": sizes.pop()}
    for what in ("seconds", "cpu_seconds"):
        times = {name: [turn[name][what] for turn in turns[1:]] for name in commands}
        result |= {f"{name}_{what}": values for name, values in times.items()}
        ratios = [a / b for a, b in zip(times["polarlm"], times["bare"], strict=True)]
        result[f"{what}_ratio"] = statistics.median(ratios)
    return result


def describe(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    heads = ["ranks", "polarlm, s to the first step", "bare, s", "ratio", "polarlm, CPU s", "bare, CPU s", "ratio"]
    rows = []
    for result in results:
        row = [str(result["ranks"])]
        for what in ("seconds", "cpu_seconds"):
            row += [f"{statistics.median(result[f'{name}_{what}']):.2f}" for name in ("polarlm", "bare")]
            row.append(f"{result[f'{what}_ratio']:.2f}")
        rows.append(row)
    return as_table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    machine = describe_machine("polarlm", "torch")
    results = [measure(ranks, arguments.rounds) for ranks in arguments.ranks]
    publish("startup", {"machine": machine, "results": results}, describe(results))


if __name__ == "__main__":
    main()
