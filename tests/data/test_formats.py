"""Compressed and columnar inputs hold the documents that the plain ones hold."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from polarlm.config import UserError
from polarlm.data import IndexedDataset, prepare, read_texts

TEXTS = ["one", "zwei größer", "", "three\u2028lines\nand more"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def _write(folder, kind):
    path = folder / f"a{kind}"
    if kind == ".jsonl":
        path.write_bytes(LINES)
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(LINES))
    elif kind == ".jsonl.zst":
        path.write_bytes(zstandard.compress(LINES))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "other": range(4)}), path)
    return str(path)


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_kind_gives_the_same_documents(tmp_path, kind):
    source = _write(tmp_path, kind)
    assert list(read_texts([source])) == [text for text in TEXTS if text]
    manifest = prepare([source], "bytes", tmp_path / "out")
    assert (manifest["documents"], manifest["skipped"]) == (3, 1)
    dataset = IndexedDataset(tmp_path / "out")
    assert bytes(dataset.document(1)[:-1].astype("uint8")).decode() == TEXTS[1]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path, kind):
    source = tmp_path / f"a{kind}"
    source.write_bytes(Path(_write(tmp_path, kind)).read_bytes()[:30])
    with pytest.raises(UserError, match=f"a{kind}"):
        prepare([str(source)], "bytes", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_missing_column_names_those_there_are(tmp_path):
    with pytest.raises(UserError, match="no column 'body', but text, other"):
        list(read_texts([_write(tmp_path, ".parquet")], text_key="body"))
