"""How fast PolarLM trains on this CPU: its own step beside `transformers`' and `litgpt`'s, and beside bare products.

    python benchmarks/train_cpu.py [--threads 2] [--rounds 5] [--only NAME ...]

One model for all: Llama, 8 layers, hidden 512, 8 heads, ffn 1408 (SwiGLU), vocabulary 8192, 34 million parameters, 8
sequences of 512 random tokens a step, fp32, fused AdamW, gradient norm clipped. A step is forward, loss, backward,
clipping and the optimizer. Ours is `polarlm.train.train_step`, which every run takes. `litgpt`'s loss is its own; each
peer runs eager and compiled.

Each contestant is a process of its own that is ready before the first round; they then take a step each in turn, so
that whatever else the machine does meets all alike. Rates are medians over the rounds, ratios are medians of the ratios
within a round. "Bare products" are all the products of weights and activations of one step, and nothing else, by
`torch.mm` into memory that is there already: the matrix rate of this machine at this model's shapes.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from results import as_table, describe_machine, installed_version, publish

LAYERS, HIDDEN, HEADS, FFN, VOCABULARY, LENGTH, BATCH = 8, 512, 8, 1408, 8192, 512, 8
TOKENS = LENGTH * BATCH
CLIP, LEARNING_RATE, WARMUP = 1.0, 3e-4, 2

# A contestant: what builds its step, and the package it is of.
CONTESTANTS = {
    "polarlm, compiled": ("polarlm", lambda: polarlm_step(compiles=True)),
    "polarlm, eager": ("polarlm", lambda: polarlm_step(compiles=False)),
    "transformers, compiled": ("transformers", lambda: transformers_step(compiles=True)),
    "transformers, eager": ("transformers", lambda: transformers_step(compiles=False)),
    "litgpt, compiled": ("litgpt", lambda: litgpt_step(compiles=True)),
    "litgpt, eager": ("litgpt", lambda: litgpt_step(compiles=False)),
    "bare products": ("torch", lambda: bare_products()),
}
OURS, PRODUCTS = "polarlm, compiled", "bare products"
HOW_TO_INSTALL = {"litgpt": "pip install 'polarlm[bench]' && pip install --no-deps litgpt"}

Step = Callable[[], float]  # takes one, and gives its loss


def polarlm_step(compiles: bool) -> tuple[int, Step]:
    """(parameters, step) of ours."""
    import torch

    from polarlm.data import Batch
    from polarlm.parallel import Device, Engine, World
    from polarlm.train import build_optimizer, train_step

    config = run_config(compiles)
    engine = Engine(config, World(0, 1, Device(torch.device("cpu"))))
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    tokens, targets = (part.numpy() for part in random_tokens())
    batch = Batch(tokens, targets, torch.arange(LENGTH).expand(BATCH, -1).numpy(), None)
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    return count, lambda: train_step(engine, optimizer, [batch], clip=CLIP).loss


def run_config(compiles: bool) -> Any:
    """The run that is timed, as its user would write it."""
    from polarlm.config import load_run

    shape = {"family": "llama", "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN}
    shape["vocab-size"] = VOCABULARY
    train = {"seq-len": LENGTH, "micro-batch-size": BATCH, "steps": 1000, "compile": compiles}
    fields = {f"model.{name}": value for name, value in shape.items()}
    fields |= {f"train.{name}": value for name, value in train.items()}
    flags = [word for path, value in fields.items() for word in (f"--{path}", str(value))]
    return load_run(None, environment={}, flags=flags).config


def transformers_step(compiles: bool) -> tuple[int, Step]:
    """(parameters, step) of `transformers.LlamaForCausalLM`, which computes its loss itself."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens, _ = random_tokens()
    return plain_step(model, compiles, lambda run: run(input_ids=tokens, labels=tokens).loss)


def litgpt_step(compiles: bool) -> tuple[int, Step]:
    """(parameters, step) of `litgpt.GPT`, with the loss its own pre-training uses."""
    import litgpt
    from litgpt.utils import chunked_cross_entropy

    config = litgpt.Config(
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        intermediate_size=FFN,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        block_size=LENGTH,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model = litgpt.GPT(config)
    tokens, targets = random_tokens()
    return plain_step(model, compiles, lambda run: chunked_cross_entropy(run(tokens), targets))


def plain_step(model: Any, compiles: bool, loss_of: Callable[[Any], Any]) -> tuple[int, Step]:
    """(parameters, step) of a peer in a plain loop, with the optimizer and clipping that ours has."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if compiles else model

    def step() -> float:
        loss = loss_of(run)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return sum(parameter.numel() for parameter in model.parameters()), step


def bare_products() -> tuple[int, Step]:
    """(0, all matrix products of a step's forward and backward): y = x Wᵀ, dx = dy W and dW = dyᵀ x of each matrix."""
    import torch

    block = [(HIDDEN, HIDDEN)] * 4 + [(FFN, HIDDEN)] * 2 + [(HIDDEN, FFN)]
    shapes = block * LAYERS + [(VOCABULARY, HIDDEN)]
    operations = sum(3 * 2 * TOKENS * rows * columns for rows, columns in shapes)
    assert operations == product_flops(), f"{operations} operations, and by polarlm.plan {product_flops()}"
    matrices = {shape: (torch.rand(shape), torch.empty(shape)) for shape in set(shapes)}
    widths = (HIDDEN, FFN, VOCABULARY)
    activations = {width: (torch.rand(TOKENS, width), torch.empty(TOKENS, width)) for width in widths}

    def products() -> float:
        for rows, columns in shapes:
            weight, weight_grad = matrices[rows, columns]
            (x, x_grad), (y_grad, y) = activations[columns], activations[rows]
            torch.mm(x, weight.mT, out=y)
            torch.mm(y_grad, weight, out=x_grad)
            torch.mm(y_grad.mT, x, out=weight_grad)
        return 0.0

    return 0, products


def product_flops() -> int:
    """Operations of a step's products of weights with activations: all but attention's own two."""
    from polarlm.plan import attention_score_flops, model_flops

    model = run_config(False).model
    scores = LAYERS * attention_score_flops(model, TOKENS, LENGTH, causal=False)
    return model_flops(model, TOKENS, LENGTH, causal=False) - 3 * scores


def random_tokens() -> Any:
    """(tokens, targets), int64 [B, S] each: the same for all."""
    import torch

    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Ended(Exception):
    """A contestant is gone; why, its own output says."""


class Contestant:
    """A process that takes a step whenever it is told to."""

    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--contestant", name]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.parameters = self._answer()["parameters"]

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def step(self) -> dict[str, float]:
        """Take one: {seconds, loss, peak_mib}."""
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise Ended(f"ended early, with exit code {self._process.wait()}")


def contend(name: str) -> None:
    """The other end of `Contestant`: warm up, then take a step for each line of the input."""
    parameters, step = CONTESTANTS[name][1]()
    for _ in range(WARMUP):
        step()
    print(json.dumps({"parameters": parameters}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_mib": peak}), flush=True)


def measure(names: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Every contestant's steps, and what they mean."""
    machine = describe_machine("polarlm", "torch", "transformers", "litgpt") | {"threads": threads}
    packages = {name: CONTESTANTS[name][0] for name in names}
    missing = {name: how_to_install(each) for name, each in packages.items() if installed_version(each) is None}
    with ExitStack() as stack:
        contestants = {}
        for name in names:
            if name in missing:
                continue
            print(f"getting ready: {name}", file=sys.stderr)
            try:
                contestants[name] = stack.enter_context(Contestant(name, threads))
            except Ended as reason:
                if name == OURS:
                    raise
                missing[name] = str(reason)
        sizes = {contestant.parameters for contestant in contestants.values()} - {0}
        assert len(sizes) == 1, f"the models differ in size: {sizes}"
        turns = [{name: contestant.step() for name, contestant in contestants.items()} for _ in range(rounds)]
    return {
        "machine": machine,
        "parameters": sizes.pop(),
        **compare(turns),
        "missing": missing,
    }


def compare(turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """What the rounds of steps say: rates, shares of the matrix rate, how much faster ours is."""
    from polarlm.plan import model_flops

    model = run_config(False).model
    flops = {count: model_flops(model, TOKENS, LENGTH, causal=count == "causal") for count in ("full", "causal")}
    seconds = {name: [turn[name]["seconds"] for turn in turns] for name in turns[0]}
    bare, ours = seconds.get(PRODUCTS), seconds.get(OURS)
    results: dict[str, dict[str, Any]] = {}
    for name, taken in seconds.items():
        last = turns[-1][name]
        rate = TOKENS / statistics.median(taken)
        results[name] = {
            "tokens_per_s": rate,
            "seconds": taken,
            "peak_mib": last["peak_mib"],
            "last_loss": last["loss"],
        }
        if bare and name != PRODUCTS:
            shares = {count: flops[count] / product_flops() * ratio(bare, taken) for count in flops}
            results[name] |= {f"share_of_matrix_rate_{count}": share for count, share in shares.items()}
        if ours:
            results[name]["polarlm_compiled_is_faster_by"] = ratio(taken, ours)
    gflops = product_flops() / statistics.median(bare) / 1e9 if bare else None
    return {"bare_products_gflops_per_s": gflops, "contestants": results}


def ratio(above: list[float], below: list[float]) -> float:
    """Median over the rounds of one's seconds divided by the other's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def how_to_install(package: str) -> str:
    """That a peer is not there, and what to type to have it."""
    return f"not installed: {HOW_TO_INSTALL.get(package, f'pip install {package}')}"


def describe(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    rows = []
    for name, values in result["contestants"].items():
        if name == PRODUCTS:
            rows.append([name, "", f"{result['bare_products_gflops_per_s']:,.1f} GFLOP/s", "100 %", "", ""])
            continue
        shares = [values.get(f"share_of_matrix_rate_{count}") for count in ("full", "causal")]
        rows.append(
            [
                name,
                f"{values['tokens_per_s']:,.0f}",
                f"{values.get('polarlm_compiled_is_faster_by', float('nan')):.2f}",
                *("" if share is None else f"{share:.1%}" for share in shares),
                f"{values['peak_mib']:,}",
            ]
        )
    rows += [[name, reason, "", "", "", ""] for name, reason in result["missing"].items()]
    heads = [
        "",
        "tokens/s",
        "its step ÷ polarlm's, compiled",
        "share of the matrix rate, attention in full",
        "causal half only",
        "peak MiB",
    ]
    return as_table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contend(arguments.contestant)
        return
    result = measure(arguments.only, arguments.threads, arguments.rounds)
    publish("train_cpu", result, describe(result))


if __name__ == "__main__":
    main()
