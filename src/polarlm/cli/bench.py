"""Measure on this machine, or on the nodes of the job this stands in, how fast a run trains and how long its sequences
may be.

polarlm bench sequence --model GPT125M --lengths 2k,4k,8k            speed and memory at each length
polarlm bench sequence run.yaml --lengths 2k,8k,32k --layouts alone,ring2,ulysses2
polarlm bench max-sequence run.yaml --layouts tensor2                the longest that trains

Each measurement is in fresh processes, on synthetic data, one sequence a data-parallel rank; every field of a run is a
flag. What does not fit the memory is a row that says OOM.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.bench import Row, Task
    from polarlm.config import RunConfig
    from polarlm.verify import Layout

TAKES_CONFIG_FLAGS = True
_ONE_SEQUENCE = (
    "--train.micro-batch-size 1 --train.gradient-accumulation-steps 1 --train.seq-len-schedule [] "
    "--data.samples stream --data.group-by-length false"
).split()
_BATCH_FLAGS = ("--train.micro-batch-size", "--train.gradient-accumulation-steps", "--train.global-batch-size")
_NO_END = ("--train.steps", "1000000", "--train.tokens", "null")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is measured; a run's fields are taken as flags without being declared."""
    parser.add_argument("what", choices=("sequence", "max-sequence"))
    parser.add_argument("run", nargs="?", type=Path, metavar="run.yaml")
    parser.add_argument("--lengths", default="2k,4k,8k", metavar="N,N", help="sequence lengths, such as 512,2k,1M")
    parser.add_argument("--layouts", default="alone", metavar="NAMES", help="as `polarlm verify --list` names them")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each; their median counts")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--memory", metavar="SIZE", help="what a rank may hold of the host's memory, such as 4G")
    parser.add_argument("--from", dest="start", default="1k", metavar="N", help="of max-sequence: the first length")
    parser.add_argument("--up-to", default="1M", metavar="N", help="of max-sequence: the last length")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for sequence.json, sequence.md, sequence.png")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Measure; 1 where nothing trained at all."""
    from polarlm.bench import Task
    from polarlm.config import UserError
    from polarlm.verify import choose_layouts

    if arguments.steps < 1 or arguments.warmup < 0:
        raise UserError("--steps: take 1 or more, and --warmup 0 or more")
    task = Task(arguments.warmup, arguments.steps, size(arguments.memory, "--memory") if arguments.memory else None)
    layouts = choose_layouts(arguments.layouts)
    if arguments.what == "max-sequence":
        return _find_longest(arguments, layouts, replace(task, warmup=0, steps=1))
    rows: list[Row] = []
    try:
        rows.extend(_measure(arguments, layouts, task))
    finally:  # what was measured before Ctrl-C, or the end of a job's time, is kept
        if arguments.json and rows:
            print(json.dumps([asdict(row) for row in rows], indent=2), flush=True)
        if arguments.output and rows:
            _write(rows, arguments.output)
            if not arguments.json:  # whose reader wants nothing else
                print(f"written: {arguments.output}/sequence.json, sequence.md, sequence.png", flush=True)
    return int(not any(row.is_ok for row in rows))


def size(text: str, flag: str) -> int:
    """`2048`, `2k`, `1M`, `4G`: units of 1024.

    Raises:
        UserError: it is none of these.
    """
    from polarlm.config import UserError

    match = re.fullmatch(r"([1-9]\d{0,15})([kmg]?)", text.strip().lower())
    if not match:
        raise UserError(f"{flag}: {text!r} is no size; write it as 2048, 2k, 1M")
    return int(match[1]) * _UNITS[match[2]]


def _measure(arguments: argparse.Namespace, layouts: "list[Layout]", task: "Task") -> "Iterator[Row]":
    from polarlm.bench import head, line

    lengths = [size(length, "--lengths") for length in arguments.lengths.split(",")]
    width = max(len(layout.name) for layout in layouts)
    if not arguments.json:
        print(head(width), flush=True)
    for layout in layouts:
        for length in lengths:
            row = _try(arguments, layout, length, task)
            if not arguments.json:
                print(line(row, width), flush=True)
            yield row


def _try(arguments: argparse.Namespace, layout: "Layout", length: int, task: "Task") -> "Row":
    """One length; a layout that cannot share it out is a row that says why."""
    from polarlm.bench import Row, try_run
    from polarlm.config import UserError

    try:
        return try_run(layout.name, _config(arguments, layout, length), task)
    except UserError as error:
        return Row(layout.name, layout.ranks, length, str(error), {})


def _config(arguments: argparse.Namespace, layout: "Layout", length: int) -> "RunConfig":
    from polarlm.config import load_run, with_tokenizer
    from polarlm.data import load_tokenizer, tokenizer_of

    flags = [*_ONE_SEQUENCE, *arguments.config_flags, *_NO_END]
    if not any(word.startswith(_BATCH_FLAGS) for word in arguments.config_flags):
        flags += ["--train.global-batch-size", str(layout.data)]  # a run file's would be another
    flags += [*layout.flags, "--train.seq-len", str(length)]
    config = load_run(arguments.run, environment=os.environ, flags=["--data.paths", "synthetic", *flags]).config
    if config.model.vocab_size is not None:
        return config
    data = load_run(arguments.run, environment=os.environ, flags=flags).config.data  # the run's own says how many ids
    tokenizer = data.tokenizer or tokenizer_of(data)
    return with_tokenizer(config, tokenizer, load_tokenizer(tokenizer).vocab_size)


def _find_longest(arguments: argparse.Namespace, layouts: "list[Layout]", task: "Task") -> int:
    from polarlm.bench import OOM, longest
    from polarlm.config import UserError

    start, most = size(arguments.start, "--from"), size(arguments.up_to, "--up-to")
    if start > most:
        raise UserError(f"--from: {start} is beyond --up-to {most}; begin with a shorter one")
    found_any = False
    for layout in layouts:
        parallel = _config(arguments, layout, start).parallel
        multiple = math.lcm(parallel.tensor * parallel.context, 2 * parallel.context if parallel.context > 1 else 1, 64)

        def trains(length: int, layout: "Layout" = layout) -> bool:
            row = _try(arguments, layout, length, task)
            if not row.is_ok and row.outcome != OOM:
                raise UserError(f"{layout.name} at {length}: {row.outcome}")
            print(f"{layout.name}: {length:,} {'trains' if row.is_ok else 'does not fit'}", flush=True)
            return row.is_ok

        last = max(start, most // multiple * multiple)
        found = longest(trains, start, last, multiple)
        found_any |= found is not None
        told = f"longest {found:,} tokens" if found else f"not even {start:,} tokens fit"
        print(f"{layout.name}: {told}{f', and --up-to {most:,} ended the search' if found == last else ''}", flush=True)
    return int(not found_any)


def _write(rows: "list[Row]", folder: Path) -> None:
    from polarlm.bench import as_markdown, draw_rows
    from polarlm.report import save_png

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sequence.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    (folder / "sequence.md").write_text(as_markdown(rows) + "\n", encoding="utf-8")
    save_png(draw_rows(rows), folder / "sequence.png")
