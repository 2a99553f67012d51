"""Train a tokenizer on text.

polarlm tokenizer train book.txt articles/ --vocab-size 8192 --output data/tokenizer
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `train`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="train")
    train = verbs.add_parser("train", help="byte-level BPE, as tokenizer.json")
    kinds = "a folder, .txt .md .py .rst .jsonl .jsonl.gz .jsonl.zst .parquet, or `stdlib`"
    train.add_argument("inputs", nargs="+", metavar="INPUT", help=kinds)
    train.add_argument("--vocab-size", type=int, required=True, help="ids in all, the end-of-document token counted")
    train.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for tokenizer.json")
    train.add_argument("--text-key", default="text", help="where a JSON line holds its text (text)")
    train.add_argument("--bad-lines", choices=["error", "skip"], default="error", help="stop at one, or leave it out")


def run(arguments: argparse.Namespace) -> None:
    """Train and save."""
    from polarlm.data import read_texts, train_tokenizer

    texts = read_texts(arguments.inputs, arguments.text_key, arguments.bad_lines)
    tokenizer = train_tokenizer(texts, arguments.vocab_size, arguments.output, show_progress=sys.stderr.isatty())
    print(f"{arguments.output}: {tokenizer.vocab_size} ids")
