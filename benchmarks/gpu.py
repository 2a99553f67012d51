"""How fast one GPU trains, and what of its memory a long sequence takes: Llama-3's 8B and the deck's GPT1_5B, in bf16.

    python benchmarks/gpu.py [--quick] [--minutes 7] [--only Llama3_8B GPT1_5B]
    python benchmarks/gpu.py --tiny      tiny matrices, eager, on a CPU too: tries this script, writes nothing

Without a GPU it says so in one line. Each run is in fresh processes, as `polarlm bench` measures: random ids, one
device, AdamW, whole steps; memory's end is a row that says OOM. What the marks need comes first, no run is begun after
`--minutes`, and what is left out is named. `--quick` measures 8k tokens alone.

**A few layers stand for all.** The 8B's states alone are 128 GB, so 2 and 4 of its 32 layers are trained (4 and 12 of
GPT1_5B's 48), with embedding, head and loss whole. Their difference is what a layer costs, in seconds and in bytes, its
share of clipping and of AdamW included; the rest is what everything else costs; the two give the whole model's step.
So MFU and TFLOPS are those of a device that computes the whole model's step, wherever its states are. One row trains
all 48 layers of GPT1_5B, and says how far that is from what its few layers foretell.

**Lengths.** Up to 8k tokens a step has 8,192 tokens, compiled, nothing recomputed. Longer ones are one sequence with
`train.recompute full`, `train.offload_activations host` and `train.tile 4096`. `train.parameter_precision` is bf16.

**500k tokens.** What the peaks at the two longest lengths are beside the states (16 bytes a parameter) gives a line,
and on it 500,000 tokens; to that are added the states as a layout holds them on a device, by arithmetic. Peaks are of
bytes allocated: what torch's allocator keeps in reserve is not in them.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from few_layers import extrapolate, foretell
from results import as_table, describe_machine, publish

from polarlm.bench import Row, Task, as_markdown, head, line, try_run
from polarlm.config import RunConfig, UserError, load_run
from polarlm.plan import buffer_bytes, count_parameters, device_peak, state_bytes

LLAMA, GPT = "Llama3_8B", "GPT1_5B"
DEPTHS = {LLAMA: (2, 4), GPT: (4, 12)}  # layers that stand for all
LENGTHS = (2048, 8192, 32_768, 131_072)
STEP_TOKENS = MARKED = 8192  # of a step of short sequences; the length whose MFU is marked
TILE = 4096
FAST = {"compile": "true"}
LEAN = {"recompute": "full", "offload-activations": "host"}
SWITCHES = {
    "attention flash": {"attention": "flash"},
    "attention cudnn": {"attention": "cudnn"},
    "parameters in fp32": {"parameter-precision": "fp32"},
    "eager": {"compile": "false"},
    "eager, norms by their formula": {"compile": "false", "fused-norms": "false"},
}
# Matrices of the rehearsal, and what its lengths are divided by.
TINY = {"hidden": 64, "heads": 4, "kv-heads": 2, "ffn": 128, "vocab-size": 256}
TINY_BY = 64

MFU_MARK, TOKENS_MARK, DEVICE_BYTES = 0.5, 500_000, 80e9
# A layout of the 8B: devices that share the states out by ZeRO-3, and bytes a parameter of the optimizer's on them.
HOMES = {
    "one device, parallel.offload optimizer": (1, 4),
    "ZeRO-3 on 4 devices": (4, 12),
    "ZeRO-3 on 8 devices": (8, 12),
    "ZeRO-3 on 8 devices, parallel.offload optimizer": (8, 4),
}
GIB = 2**30


@dataclass(frozen=True)
class Run:
    """What is measured at once: so many layers of a preset, or all where `layers` is None."""

    preset: str
    layers: int | None
    seq_len: int
    switch: str = ""

    @property
    def name(self) -> str:
        """As the rows have it."""
        depth = "all layers" if self.layers is None else f"{self.layers} layers"
        return ", ".join(filter(None, (self.preset, depth, self.switch)))

    def config(self, is_tiny: bool = False) -> RunConfig:
        """The run as its user would write it."""
        by = TINY_BY if is_tiny else 1
        train = {
            "precision": "bf16",
            "parameter-precision": "bf16",
            "seq-len": self.seq_len // by,
            "micro-batch-size": max(1, STEP_TOKENS // self.seq_len),
            "steps": 1_000_000,  # a rate that hardly changes in the first few
            **(FAST if self.seq_len <= STEP_TOKENS else LEAN | {"tile": TILE // by}),
            **SWITCHES.get(self.switch, {}),
            **({"compile": "false"} if is_tiny else {}),
        }
        model = {"preset": self.preset, **(TINY if is_tiny else {})}
        if self.layers is not None:
            model["layers"] = self.layers
        fields = {f"train.{name}": value for name, value in train.items()}
        fields |= {f"model.{name}": value for name, value in model.items()} | {"parallel.ranks": 1}
        words = [word for path, value in fields.items() for word in (f"--{path}", str(value))]
        return load_run(None, environment={}, flags=words).config


Rows = Mapping[Run, Row]
Whole = Mapping[tuple[str, int], dict[str, Any]]  # what is foretold, by preset and length


def choose_runs(presets: Collection[str], is_quick: bool) -> list[Run]:
    """Those that the marks need come first, since time may end."""

    def few(length: int, *names: str) -> list[Run]:
        return [Run(name, layers, length) for name in names for layers in DEPTHS[name]]

    runs = few(MARKED, LLAMA, GPT)
    if not is_quick:
        short, _, long, longest = LENGTHS
        runs += few(longest, LLAMA) + few(long, LLAMA)
        runs += [Run(LLAMA, max(DEPTHS[LLAMA]), MARKED, switch) for switch in SWITCHES]
        runs += few(longest, GPT) + few(long, GPT) + [Run(GPT, None, MARKED)] + few(short, LLAMA, GPT)
    return [run for run in runs if run.preset in presets]


def measure(runs: Collection[Run], seconds: float, steps: int, is_tiny: bool) -> Iterator[tuple[Run, Row]]:
    """Each run's row as it comes; of one whose turn is after so many seconds, that it was left out."""
    width, start = max(len(run.name) for run in runs), time.monotonic()
    print(head(width), file=sys.stderr)
    for run in runs:
        is_late = time.monotonic() - start > seconds
        left_out = Row(run.name, 1, run.seq_len, "left out: time was over", {})
        row = left_out if is_late else measure_one(run, steps, is_tiny)
        print(line(row, width), file=sys.stderr, flush=True)
        yield run, row


def measure_one(run: Run, steps: int, is_tiny: bool) -> Row:
    """A short sequence's first two steps compile and settle; a long one's steps are long, so fewer are taken."""
    task = Task(warmup=2, steps=steps) if run.seq_len <= STEP_TOKENS else Task(warmup=1, steps=min(steps, 2))
    try:
        return try_run(run.name, run.config(is_tiny), task)
    except UserError as error:
        return Row(run.name, 1, run.seq_len, f"failed: {error}", {})


def conclude(rows: Rows, device: str, is_tiny: bool = False) -> dict[str, Any]:
    """What the rows say of the whole models, and the marks.

    Args:
        device: its name, by which its peak is known.
    """
    known = device_peak(device)
    peak = known.tflops("bf16") if known else None
    whole = {}
    for preset, length in product(DEPTHS, LENGTHS):
        runs = [Run(preset, layers, length) for layers in DEPTHS[preset]]
        few = [(run.config(is_tiny), rows[run]) for run in runs if run in rows and rows[run].is_ok]
        told = foretell(Run(preset, None, length).config(is_tiny), few, peak) if len(few) == len(runs) else None
        if told is not None:
            whole[preset, length] = told
    judged = {} if is_tiny else whole
    return {
        "peak_tflops": peak,
        "rows": [asdict(row) for row in rows.values()],
        "whole": list(whole.values()),
        "marks": [mark_speed(judged), *mark_memory(judged)],
        "all_layers": compare_all_layers(whole, rows),
    }


def mark_speed(whole: Whole) -> dict[str, str]:
    """Whether the 8B reaches the mark's share of the device's peak at its length."""
    mfu = whole.get((LLAMA, MARKED), {}).get("mfu")
    found = "no MFU" if mfu is None else f"MFU {mfu:.1%}"
    passes = None if mfu is None else mfu >= MFU_MARK
    return _mark(passes, f"{LLAMA}, {MARKED:,} tokens: {found}, wanted {MFU_MARK:.0%}")


def mark_memory(whole: Whole) -> list[dict[str, str]]:
    """Whether the 8B's step of `TOKENS_MARK` tokens fits the mark's device, one by one for the layouts."""
    model = Run(LLAMA, None, LENGTHS[-1]).config().model
    assert model.vocab_size is not None
    on_host = model.layers * TOKENS_MARK * model.hidden * 2
    lean = [length for length in LENGTHS if length > STEP_TOKENS and (LLAMA, length) in whole]
    beside = {length: whole[LLAMA, length]["beside_states_bytes"] for length in lean}
    needed = extrapolate(beside, TOKENS_MARK) if len(beside) == 2 else None
    parameters = count_parameters(model)
    block = count_parameters(model.model_copy(update={"layers": 1})) - count_parameters(
        model.model_copy(update={"layers": 0})
    )
    marks = []
    for home, (devices, optimizer) in HOMES.items():
        states = state_bytes(parameters, 3, devices, parameter=2 * (devices > 1), optimizer=optimizer).total
        if devices > 1:  # and at the peak the embedding's gradient may not be there yet
            states += buffer_bytes(block) + 4 * model.vocab_size * model.hidden
        rest = "what was not measured" if needed is None else f"{needed / 1e9:.1f} GB extrapolated"
        what = f"{states / 1e9:.1f} GB of states by arithmetic and {rest}, wanted {DEVICE_BYTES / 1e9:.0f} GB"
        passes = None if needed is None else states + needed <= DEVICE_BYTES
        place = f"{LLAMA}, {TOKENS_MARK:,} tokens, {on_host / 1e9:.0f} GB of block inputs on the host, {home}"
        marks.append(_mark(passes, f"{place}: {what}"))
    return marks


def _mark(passes: bool | None, what: str) -> dict[str, str]:
    return {"verdict": {None: "not measured", True: "pass", False: "fail"}[passes], "what": what}


def compare_all_layers(whole: Whole, rows: Rows) -> dict[str, float] | None:
    """All of GPT1_5B's layers as measured, divided by what a few foretell; None where one of them is missing."""
    row, told = rows.get(Run(GPT, None, MARKED)), whole.get((GPT, MARKED))
    if row is None or not row.is_ok or told is None:
        return None
    return {
        "step_time": row.numbers["step_time_s"] / told["step_time_s"],
        "peak_memory": row.numbers["peak_memory_bytes"] / (told["state_bytes"] + told["beside_states_bytes"]),
    }


def describe(result: dict[str, Any], rows: Rows) -> str:
    """The result as Markdown."""
    parts = ["Measured:", as_markdown(rows.values())]
    if result["whole"]:
        heads = ["all layers, extrapolated", "tokens", "a step", "outside the blocks", "tokens/s", "MFU"]
        heads += ["model TFLOPS", "hardware", "Megatron", "GiB a layer", "states, GiB", "all else, GiB"]
        parts.append(
            "From few layers, where more took longer, with one process's states by arithmetic (16 bytes a parameter):"
        )
        parts.append(as_table(heads, [_words(each) for each in result["whole"]]))
    if switched := _switched(rows):
        heads = ["switch", "a step", "÷ compiled, attention auto", "GiB"]
        parts += [f"Switches at {MARKED:,} tokens, {max(DEPTHS[LLAMA])} layers:", as_table(heads, switched)]
    if ratios := result["all_layers"]:
        words = f"step {ratios['step_time']:.3f}, peak memory {ratios['peak_memory']:.3f}"
        parts.append(f"{GPT}, {MARKED:,} tokens, all layers as measured ÷ as extrapolated: {words}")
    return "\n\n".join([*parts, "\n".join(f"{mark['verdict']}: {mark['what']}" for mark in result["marks"])])


def _words(each: dict[str, Any]) -> list[str]:
    place = f"{each['preset']}, of {' and '.join(map(str, each['measured_layers']))}"
    seconds = [f"{each[name]:.3f} s" for name in ("step_time_s", "outside_layers_time_s")]
    mfu = "" if each["mfu"] is None else f"{each['mfu']:.1%}"
    flops = [f"{each[f'{name}_tflops_per_device']:.3g}" for name in ("model", "hardware", "megatron")]
    memory = [f"{each[f'{name}_bytes'] / GIB:.2f}" for name in ("layer_memory", "state", "beside_states")]
    return [place, f"{each['seq_len']:,}", *seconds, f"{each['tokens_per_sec']:,.0f}", mfu, *flops, *memory]


def _switched(rows: Rows) -> list[list[str]]:
    base = rows.get(Run(LLAMA, max(DEPTHS[LLAMA]), MARKED))
    table = []
    for run, row in rows.items():
        if run.switch and not row.is_ok:
            table.append([run.switch, row.outcome, "", ""])
        elif run.switch:
            step, peak = (row.numbers[name] for name in ("step_time_s", "peak_memory_bytes"))
            ratio = f"{step / base.numbers['step_time_s']:.2f}" if base is not None and base.is_ok else ""
            table.append([run.switch, f"{step:.3f} s", ratio, f"{peak / GIB:.1f}"])
    return table


def describe_device() -> dict[str, Any] | None:
    """Name and memory of the accelerator that a run would use; None where there is none."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    facts = getattr(torch, accelerator.type).get_device_properties(0)
    return {"device": facts.name, "device_memory_bytes": facts.total_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DEPTHS, default=list(DEPTHS))
    parser.add_argument("--quick", action="store_true", help=f"{MARKED:,} tokens alone, 3 steps, 2.2 minutes")
    parser.add_argument("--minutes", type=float, help="after which no run is begun; by default 7")
    parser.add_argument("--steps", type=int, help="timed steps of a run, of which the median counts; by default 6")
    parser.add_argument("--tiny", action="store_true", help="tiny matrices, to try this script; writes nothing")
    arguments = parser.parse_args()
    minutes = arguments.minutes or (2.2 if arguments.quick else 7)
    steps = arguments.steps or (3 if arguments.quick else 6)
    # In a process of its own, which gives the device's memory back.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        device = pool.submit(describe_device).result()
    if device is None and not arguments.tiny:
        print("no GPU here, so nothing was measured and the table is empty")
        return
    device = device or {"device": "cpu"}
    machine = describe_machine("polarlm", "torch") | device
    rows = dict(measure(choose_runs(arguments.only, arguments.quick), 60 * minutes, steps, arguments.tiny))
    result = {"machine": machine, **conclude(rows, device["device"], arguments.tiny)}
    if arguments.tiny:
        print(describe(result, rows))
    else:
        publish("gpu", result, describe(result, rows))


if __name__ == "__main__":
    main()
