"""How fast text becomes token ids: `polarlm data prepare` beside the `tokenizers` library's own `encode_batch`.

    python benchmarks/prepare.py [--megabytes 10] [--rounds 3] [--json FILE]

Source-like text (this Python's own library), a byte-level BPE of GPT-2's size trained on it, all cores for both. The
library encodes what prepare reads, and writes nothing; prepare reads, checks, encodes and writes a whole dataset. The
two take turns; medians. Peak memory is that of prepare's process, for one and for twenty times the text.
"""

import argparse
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

from polarlm.data import read_texts, train_tokenizer

VOCABULARY = 50257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.megabytes, arguments.rounds)
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, float | int | str]:
    documents = list(read_texts(["stdlib"]))
    train_tokenizer(documents, VOCABULARY, folder / "tokenizer")
    text = write_text(folder / "text.jsonl", documents, megabytes)
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(text / run("library", folder, "text")[0])
        ours.append(text / run("prepare", folder, "text")[0])
    write_text(folder / "large.jsonl", documents, 20 * megabytes)
    return {
        "megabytes": megabytes,
        "cores": os.cpu_count(),
        "prepare_mb_per_s": statistics.median(ours) / 1e6,
        "library_mb_per_s": statistics.median(theirs) / 1e6,
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "peak_mib": run("prepare", folder, "text")[1],
        "peak_mib_of_20_times_the_text": run("prepare", folder, "large")[1],
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


def run(what: str, folder: Path, name: str) -> tuple[float, int]:
    """(seconds, peak MiB of the process) of one pass, in a process of its own that times itself."""
    command = [sys.executable, __file__, "--pass", what, str(folder), name]
    seconds, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
    return float(seconds), int(peak)


def one_pass(what: str, folder: Path, name: str) -> None:
    from polarlm.data import prepare

    start = time.perf_counter()
    if what == "prepare":
        prepare([f"{folder}/{name}.jsonl"], f"{folder}/tokenizer", folder / "out", workers=os.cpu_count())
        seconds = time.perf_counter() - start
    else:
        import tokenizers

        lines = (folder / f"{name}.jsonl").read_bytes().splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        engine = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer/tokenizer.json")
        start = time.perf_counter()
        engine.encode_batch(texts, add_special_tokens=False)
        seconds = time.perf_counter() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--pass"]:
        one_pass(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
