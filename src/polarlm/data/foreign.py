"""Tokenizers that a stranger made: looked at before the `tokenizers` library is trusted with them.

The library does what a tokenizer.json says, and takes minutes and gigabytes over an id of four billion.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers

from polarlm.config import UserError, parse_json

MOST_BYTES = 2**26  # twice the largest that models come with
_MOST_UNUSED = 1000  # ids without a token, beside as many as there are tokens
# What makes a regular expression, a normaliser or a decoder fail that fails on nearly any text.
_PROBE = "A probe, größer than 12345 \t'x'  \r\n\n\U0001f642 <|endoftext|> [UNK] </s>" + "a" * 100 + "!"


def read_engine(content: bytes, path: Path) -> tokenizers.Tokenizer:
    """The tokenizer that a tokenizer.json describes, each token under the id that stands there.

    Raises:
        UserError: it describes none.
    """
    with blames(path, "is not a tokenizer.json"):
        described = parse_json(content)
        model = described["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
            if len(vocabulary) < len(model["vocab"]):
                raise ValueError("a token is there twice")
        added = {token["content"]: token["id"] for token in described.get("added_tokens") or []}
        check_ids(vocabulary | added)
        with _without_panics():
            engine = tokenizers.Tokenizer.from_buffer(content)
            _probe(engine)
        if engine.get_vocab(with_added_tokens=True) != vocabulary | added:
            raise ValueError("a token has another id than it is given")
        return engine


def check_ids(vocabulary: Mapping[str, int]) -> None:
    """
    Raises:
        ValueError: it has no tokens; or ids are no whole numbers, negative, given twice, or far more than the tokens.
    """
    ids = list(vocabulary.values())
    if not ids or not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError("its vocabulary is empty, or an id is no whole number from 0")
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    if max(ids) > 2 * len(ids) + _MOST_UNUSED:
        raise ValueError(f"the largest id is {max(ids)}, of {len(ids)} tokens")


@contextlib.contextmanager
def blames(path: Path, fault: str) -> Iterator[None]:
    """
    Raises:
        UserError: instead of whatever a library raises, a panic of Rust's too; names the file.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise UserError(f"{path}: {fault} ({_reason(error)}); bring the right file, or name another") from None


def _reason(error: BaseException) -> str:
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


def _probe(engine: tokenizers.Tokenizer) -> None:
    """Let a tokenizer that cannot work fail now; one that only has no token for this text may have them for others."""
    with contextlib.suppress(Exception):
        engine.decode(engine.encode(_PROBE, add_special_tokens=False).ids)


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Keep from standard error what Rust writes there when it gives up; the exception says it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
