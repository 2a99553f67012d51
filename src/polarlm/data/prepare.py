"""From text to an indexed dataset: the same bytes for any number of workers, whole or not there, in bounded memory."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.config import UserError
from polarlm.data.fast import EncodeBatch, fast_encoder, fastest_encoder, plain_encoder
from polarlm.data.indexed import IndexedWriter, smallest_dtype
from polarlm.data.manifest import write_manifest
from polarlm.data.readers import BadDocument, RawDocument, Source, find_sources, read_raw, read_text
from polarlm.data.tokenizer import load_tokenizer
from polarlm.data.workers import ordered_map

_CHUNK_BYTES = 1 << 20
_SAMPLE_DOCUMENTS, _SAMPLE_CHARACTERS = 64, 5_000  # on which a faster engine is tried


@dataclass(frozen=True)
class _Encoded:
    """A chunk's documents as ids, one after the other, and what was left out."""

    ids: np.ndarray
    sizes: list[int]
    text_bytes: int
    raw_bytes: int
    empty: int
    bad: int


@dataclass(frozen=True)
class _Job:
    """What a worker needs to know once."""

    tokenizer: str
    text_key: str
    skips_bad: bool
    append_eod: bool
    is_fast: bool = False


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    prefix: Path,
    *,
    workers: int = 1,
    text_key: str = "text",
    bad_lines: str = "error",
    append_eod: bool = True,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]:
    """Write `prefix.bin`, `prefix.idx` and the manifest `prefix.json`, and return the manifest.

    Args:
        inputs: folders, files, or `stdlib`.
        tokenizer: as for `load_tokenizer`.
        bad_lines: `error` stops at a document that cannot be read, `skip` leaves it out and counts it.
        append_eod: end each document with the end-of-document token.
        on_progress: called now and then with (bytes read, bytes in all, documents).

    Raises:
        UserError: an input cannot be read, holds no text, the tokenizer has no end-of-document token, or a worker
            was killed.
    """
    loaded = load_tokenizer(tokenizer)
    if append_eod and loaded.eod_id is None:
        raise UserError(f"{tokenizer}: has no end-of-document token; use another tokenizer, or --no-append-eod")
    sources = find_sources(inputs)
    whole = sum(source.path.stat().st_size for source in sources)
    sample = list(itertools.islice(_texts(sources, text_key), _SAMPLE_DOCUMENTS))
    _, is_fast, engine = fastest_encoder(loaded, [text[:_SAMPLE_CHARACTERS] for text in sample])
    job = _Job(tokenizer, text_key, bad_lines == "skip", append_eod, is_fast)
    counts = {"documents": 0, "tokens": 0, "bytes": 0, "skipped": 0, "skipped_bad": 0}
    read = 0
    with IndexedWriter(prefix, smallest_dtype(loaded.vocab_size)) as writer:
        for encoded in _encode_all(_chunks(read_raw(sources, text_key)), job, workers):
            for ids in np.split(encoded.ids, np.cumsum(encoded.sizes)[:-1]):
                if len(ids):
                    writer.add_document(ids)
            read += encoded.raw_bytes
            counts["documents"] += len(encoded.sizes)
            counts["tokens"] += len(encoded.ids)
            counts["bytes"] += encoded.text_bytes
            counts["skipped"] += encoded.empty + encoded.bad
            counts["skipped_bad"] += encoded.bad
            if on_progress:
                on_progress(read, whole, counts["documents"])
        if not counts["documents"]:
            empty = counts["skipped"] - counts["skipped_bad"]
            raise UserError(
                f"{', '.join(inputs)}: no text in there ({empty} empty and {counts['skipped_bad']} bad documents)"
            )
    described = {
        "path": tokenizer,
        "digest": loaded.digest,
        "vocab_size": loaded.vocab_size,
        "eod_id": loaded.eod_id,
    }
    return write_manifest(prefix, {**counts, "engine": engine, "tokenizer": described})


def _texts(sources: Sequence[Source], text_key: str) -> Iterator[str]:
    """The texts that can be read."""
    for raw in read_raw(sources, text_key):
        with contextlib.suppress(BadDocument):
            yield read_text(raw, text_key)


def _chunks(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    chunk: list[RawDocument] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.content)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode_all(chunks: Iterable[list[RawDocument]], job: _Job, workers: int) -> Iterator[_Encoded]:
    """The chunks encoded, in their order, with only a few in flight at a time."""
    if workers == 1:
        return map(_encoder(job), chunks)
    return ordered_map(partial(_encoder_of_worker, job), chunks, workers)


def _encoder(job: _Job) -> Callable[[list[RawDocument]], _Encoded]:
    tokenizer = load_tokenizer(job.tokenizer)
    encode = fast_encoder(tokenizer) if job.is_fast else plain_encoder(tokenizer)
    end = [tokenizer.eod_id] if job.append_eod else []
    return partial(_encode, job=job, encode_batch=encode, end=np.array(end, np.int32))


def _encoder_of_worker(job: _Job) -> Callable[[list[RawDocument]], _Encoded]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    return _encoder(job)


def _encode(chunk: list[RawDocument], job: _Job, encode_batch: EncodeBatch, end: np.ndarray) -> _Encoded:
    texts, empty, bad = [], 0, 0
    for raw in chunk:
        try:
            text = read_text(raw, job.text_key)
        except BadDocument as error:
            if not (raw.skips_bad or job.skips_bad):
                raise UserError(f"{error}; or leave such out with --bad-lines skip") from None
            bad += 1
            continue
        if text:
            texts.append(text)
        else:
            empty += 1
    documents = [ids for ids in encode_batch(texts) if len(ids) + len(end)]
    empty += len(texts) - len(documents)  # a text of which a tokenizer keeps nothing
    parts = [part for ids in documents for part in (ids, end)]
    return _Encoded(
        ids=np.concatenate(parts) if parts else end[:0],
        sizes=[len(ids) + len(end) for ids in documents],
        text_bytes=sum(len(text.encode()) for text in texts),
        raw_bytes=sum(len(raw.content) for raw in chunk),
        empty=empty,
        bad=bad,
    )
