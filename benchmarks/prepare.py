"""How fast text becomes token ids: `polarlm data prepare` beside the `tokenizers` library's own `encode_batch`.

    python benchmarks/prepare.py [--megabytes 40] [--rounds 3]

Source-like text (this Python's own library), a byte-level BPE of GPT-2's size trained on it, all cores for both. The
library encodes what lies in memory, and writes nothing; prepare starts its processes, reads, checks, encodes and writes
a whole dataset, and all of that is timed. The ids are compared. The two take turns; rates are medians, the ratio is the
median of the ratios within a round. Peak memory is that of prepare's largest process, for 10 and for 200 MB of text.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from results import as_table, describe_machine, publish

from polarlm.data import read_texts, train_tokenizer

VOCABULARY = 50257
SMALL, LARGE = 10, 200  # MB of text, whose peaks of memory are compared


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Both in turn on one text, then prepare alone on a small and a large one."""
    machine = describe_machine("polarlm", "tokenizers", "tiktoken")
    documents = list(read_texts(["stdlib"]))
    train_tokenizer(documents, VOCABULARY, folder / "tokenizer")
    text = write_text(folder / "text.jsonl", documents, megabytes)
    turns = [{what: run(what, folder, "text") for what in ("library", "prepare")} for _ in range(rounds)]
    assert len({one["ids"] for turn in turns for one in turn.values()}) == 1, "the ids differ"
    rates = {what: [text / turn[what]["seconds"] / 1e6 for turn in turns] for what in turns[0]}
    peaks = {}
    for size in (SMALL, LARGE):
        write_text(folder / "sized.jsonl", documents, size)
        peaks[size] = run("prepare", folder, "sized")["peak_mib"]
    return {
        "machine": machine,
        "megabytes": megabytes,
        "prepare_mb_per_s": statistics.median(rates["prepare"]),
        "library_mb_per_s": statistics.median(rates["library"]),
        "ratio": statistics.median(a / b for a, b in zip(rates["prepare"], rates["library"], strict=True)),
        "rounds_mb_per_s": rates,
        "ids_are_equal": True,
        "peak_mib": peaks,
    }


def write_text(path: Path, documents: list[str], megabytes: int) -> int:
    """Fill a file with documents, over and over where they are too few; returns the bytes of their text."""
    written = 0
    with path.open("w") as file:
        for document in cycle(documents):
            if written >= megabytes * 1e6:
                return written
            file.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
    raise AssertionError("cycle does not end")


def run(what: str, folder: Path, name: str) -> dict[str, Any]:
    """One pass, in a process of its own that times itself: {seconds, peak_mib, ids}."""
    command = [sys.executable, __file__, "--pass", what, str(folder), name]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def one_pass(what: str, folder: Path, name: str) -> None:
    """The other end of `run`; `ids` is a digest of all ids in their order, with the end of each document."""
    seconds, ids = (prepare_pass if what == "prepare" else library_pass)(folder, name)
    own, workers = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    peak = max(own, workers) // 1024
    print(json.dumps({"seconds": seconds, "peak_mib": peak, "ids": hashlib.sha256(ids).hexdigest()}))


def prepare_pass(folder: Path, name: str) -> tuple[float, bytes]:
    """(seconds, the written ids)."""
    from polarlm.data import prepare

    start = time.perf_counter()
    prepare([f"{folder}/{name}.jsonl"], f"{folder}/tokenizer", folder / "out", workers=os.cpu_count() or 1)
    seconds = time.perf_counter() - start
    return seconds, b"" if name == "sized" else (folder / "out.bin").read_bytes()


def library_pass(folder: Path, name: str) -> tuple[float, bytes]:
    """(seconds, the ids as prepare writes them)."""
    import numpy as np
    import tokenizers

    lines = (folder / f"{name}.jsonl").read_bytes().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    engine = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")
    start = time.perf_counter()
    encoded = engine.encode_batch(texts, add_special_tokens=False)
    seconds = time.perf_counter() - start
    end = [engine.token_to_id("<|endoftext|>")]
    return seconds, b"".join(np.array(one.ids + end, np.uint16).tobytes() for one in encoded if one.ids)


def describe(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    heads = [
        "",
        f"MB/s ({result['megabytes']} MB of text)",
        "÷ the library",
        *(f"peak MiB at {n} MB" for n in result["peak_mib"]),
    ]
    ours = [f"{result['prepare_mb_per_s']:.1f}", f"{result['ratio']:.2f}", *map(str, result["peak_mib"].values())]
    return as_table(
        heads, [["polarlm data prepare", *ours], ["encode_batch", f"{result['library_mb_per_s']:.1f}", "1", "", ""]]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.megabytes, arguments.rounds)
    publish("prepare", result, describe(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pass"]:
        one_pass(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
