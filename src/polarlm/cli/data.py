"""Turn text into token ids, and look at them.

polarlm data prepare corpus/ --tokenizer data/tokenizer --output data/text
polarlm data inspect data/text
polarlm data check data/text                       that every byte is as it was prepared
polarlm data compress data/text                    what gzip and xz make of its validation documents
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.data import IndexedDataset, Tokenizer

_SECONDS_BETWEEN_LINES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="prepare | merge | inspect | check | compress")

    prepare = verbs.add_parser("prepare", help="text to PREFIX.bin, PREFIX.idx and PREFIX.json")
    kinds = ".txt .md .py .rst .jsonl .jsonl.gz .jsonl.zst .parquet"
    prepare.add_argument("inputs", nargs="+", metavar="INPUT", help=f"a folder, {kinds}, or `stdlib`")
    prepare.add_argument("--tokenizer", required=True, help="`bytes`, or a folder or file")
    prepare.add_argument("--output", type=_prefix, required=True, metavar="PREFIX", help="path without ending")
    prepare.add_argument("--workers", type=_at_least_one, default=os.cpu_count(), help="processes (all cores)")
    prepare.add_argument("--text-key", default="text", help="where a JSON line holds its text (text)")
    prepare.add_argument("--bad-lines", choices=["error", "skip"], default="error", help="stop at one, or leave it out")
    prepare.add_argument(
        "--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end each document with its token"
    )

    merge = verbs.add_parser("merge", help="several datasets as one, their documents one after the other")
    merge.add_argument("prefixes", nargs="+", metavar="PREFIX")
    merge.add_argument("--output", type=_prefix, required=True, metavar="PREFIX", help="path without ending")

    inspect = verbs.add_parser("inspect", help="statistics, and the first documents as text")
    inspect.add_argument("prefix", metavar="PREFIX")
    inspect.add_argument("--documents", type=_whole, default=3, metavar="N", help="documents to show (3)")
    inspect.add_argument("--tokenizer", help="by default the one it was prepared with")

    check = verbs.add_parser("check", help="compare every byte with the manifest's digests")
    check.add_argument("prefixes", nargs="+", metavar="PREFIX")

    compress = verbs.add_parser("compress", help="what gzip -9 and xz -9 make of a part: the numbers to beat")
    compress.add_argument("prefix", metavar="PREFIX")
    compress.add_argument("--split", default="969,30,1", help="documents for training, validation, test (969,30,1)")
    compress.add_argument("--which", choices=["train", "validation", "test"], default="validation")
    compress.add_argument("--window-bytes", type=_at_least_one, help="compress pieces of this size, too")
    compress.add_argument("--tokenizer", help="by default the one it was prepared with")


def run(arguments: argparse.Namespace) -> None:
    """Do what the verb says."""
    verbs = {"prepare": _prepare, "merge": _merge, "inspect": _inspect, "check": _check, "compress": _compress}
    verbs[arguments.verb](arguments)


def _prefix(text: str) -> Path:
    if Path(text).name in ("", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} has no name that .bin and .idx could follow, as data/text has")
    return Path(text)


def _at_least_one(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _prepare(arguments: argparse.Namespace) -> None:
    from polarlm.data import prepare

    start = time.monotonic()
    with _progress() as show:
        manifest = prepare(
            arguments.inputs,
            arguments.tokenizer,
            arguments.output,
            workers=arguments.workers,
            text_key=arguments.text_key,
            bad_lines=arguments.bad_lines,
            append_eod=arguments.append_eod,
            on_progress=show,
        )
    seconds = time.monotonic() - start
    skipped = f", skipped {manifest['skipped']}" if manifest["skipped"] else ""
    bad = f" ({manifest['skipped_bad']} of them bad)" if manifest["skipped_bad"] else ""
    print(
        f"{arguments.output}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{manifest['bytes'] / manifest['tokens']:.2f} bytes a token{skipped}{bad}; "
        f"{manifest['bytes'] / seconds / 1e6:.1f} MB/s"
    )
    print(manifest["engine"])


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Shows how far the reading is: a bar on a terminal, a plain line now and then in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _ProgressLines().show
        return
    columns = (BarColumn(), TextColumn("{task.percentage:.0f} %"), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("reading"), *columns, console=console) as bar:
        task = bar.add_task("")
        yield lambda done, whole, documents: bar.update(task, completed=done, total=whole)


class _ProgressLines:
    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def show(self, done: int, whole: int, documents: int) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last, rate = now, done / (now - self._start) / 1e6
        print(f"{done / max(1, whole):.0%} read, {documents:,} documents, {rate:.1f} MB/s", file=sys.stderr, flush=True)


def _merge(arguments: argparse.Namespace) -> None:
    from polarlm.data import merge

    manifest = merge(arguments.prefixes, arguments.output)
    print(f"{arguments.output}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens")


def _inspect(arguments: argparse.Namespace) -> None:
    import numpy as np

    from polarlm.data import IndexedDataset

    dataset = IndexedDataset(arguments.prefix)
    if not dataset.documents:
        print(f"{arguments.prefix}: no documents")
        return
    starts = dataset.document_starts()
    lengths = np.diff(starts)
    print(f"documents       {dataset.documents:,}")
    print(f"tokens          {dataset.tokens:,} ({dataset.dtype.name})")
    print(f"a document      {lengths.min():,} to {lengths.max():,}, median {int(np.median(lengths)):,} tokens")
    for key in ("bytes", "skipped"):
        if dataset.manifest and key in dataset.manifest:
            print(f"{key:<15} {dataset.manifest[key]:,}")
    tokenizer = _tokenizer_of(dataset, arguments.tokenizer)
    for number in range(min(arguments.documents, dataset.documents)):
        ids = dataset.document(number)
        text = tokenizer.decode(ids[:200].tolist())
        more = " ..." if len(ids) > 200 else ""
        print(f"\ndocument {number} ({len(ids):,} tokens):\n{text}{more}")


def _check(arguments: argparse.Namespace) -> None:
    from polarlm.data import IndexedDataset, compare_whole

    for prefix in arguments.prefixes:
        dataset = IndexedDataset(prefix)
        dataset.check_index()
        compare_whole(prefix, dataset.manifest)
        print(f"{prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens, every byte as it was prepared")


def _compress(arguments: argparse.Namespace) -> None:
    from polarlm.config import UserError
    from polarlm.data import IndexedDataset, compressed_bits_per_byte, split_documents

    try:
        proportions = [float(share) for share in arguments.split.split(",")]
        if len(proportions) != 3 or min(proportions) < 0 or not 0 < sum(proportions) < math.inf:
            raise ValueError
    except ValueError:
        raise UserError(f"--split {arguments.split}: is three proportions, such as 969,30,1") from None
    dataset = IndexedDataset(arguments.prefix)
    ranges = dict(zip(("train", "validation", "test"), split_documents(dataset.documents, proportions), strict=True))
    first, stop = ranges[arguments.which]
    if first == stop:
        raise UserError(f"--split {arguments.split}: leaves no {arguments.which} document of {dataset.documents}")
    tokenizer = _tokenizer_of(dataset, arguments.tokenizer)
    text = "".join(tokenizer.decode(dataset.document(number).tolist()) for number in range(first, stop)).encode()
    print(f"{arguments.which} text: {stop - first:,} documents, {len(text):,} bytes")
    print(f"{'bits per byte':<28}{'gzip -9':>8}{'xz -9':>8}")
    windows = {"the whole text": None}
    if arguments.window_bytes:
        windows[f"in windows of {arguments.window_bytes:,} bytes"] = arguments.window_bytes
    for name, window in windows.items():
        bits = compressed_bits_per_byte(text, window)
        print(f"{name:<28}{bits['gzip']:>8.3f}{bits['xz']:>8.3f}")


def _tokenizer_of(dataset: "IndexedDataset", named: str | None) -> "Tokenizer":
    from polarlm.config import UserError
    from polarlm.data import load_tokenizer

    recorded = (dataset.manifest or {}).get("tokenizer", {})
    where = named or recorded.get("path")
    if not where:
        raise UserError(f"{dataset.prefix}: does not say how it was prepared; name its --tokenizer")
    tokenizer = load_tokenizer(where)
    if recorded.get("digest") not in (None, tokenizer.digest):
        raise UserError(f"{where}: is another tokenizer than {dataset.prefix} was prepared with; name that --tokenizer")
    return tokenizer
