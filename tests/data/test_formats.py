"""Files of every kind, against readers and writers of a few lines each that share nothing with the ones tried.

Compressed and columnar inputs hold the documents that the plain ones hold; `.bin` and `.idx` are what Megatron-LM's
format says; a list of datasets is read as its lines say.
"""

import gzip
import json
import struct
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from polarlm.config import DataConfig, UserError
from polarlm.data import IndexedDataset, merge, prepare, read_paths, read_texts

TEXTS = ["one", "zwei größer", "", "three\u2028lines\nand more"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
KINDS = {
    ".jsonl": LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "marked.jsonl": b"\xef\xbb\xbf" + LINES,
    ".jsonl.gz": gzip.compress(LINES),
    "members.jsonl.gz": gzip.compress(LINES[:20]) + gzip.compress(LINES[20:]),
    ".jsonl.zst": zstandard.compress(LINES),
    "frames.jsonl.zst": zstandard.compress(LINES[:20])
    + b"\x50\x2a\x4d\x18\3\0\0\0xyz"
    + zstandard.compress(LINES[20:]),
}
COLUMNS = {
    ".parquet": pyarrow.array(TEXTS),
    "large.parquet": pyarrow.array(TEXTS, pyarrow.large_string()),
    "binary.parquet": pyarrow.array([text.encode() for text in TEXTS]),
    "repeated.parquet": pyarrow.array(TEXTS).dictionary_encode(),
    "absent.parquet": pyarrow.array([text or None for text in TEXTS]),
}


def _write(folder, kind):
    path = folder / f"a{kind}"
    if kind in KINDS:
        path.write_bytes(KINDS[kind])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": COLUMNS[kind], "other": range(4)}), path, row_group_size=3)
    return str(path)


def read_by_hand(prefix) -> list[list[int]]:
    """The documents' ids, by the format's description alone."""
    index, ids = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    version, code, sequences, boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert (index[:9], version) == (b"MMIDIDX\0\0", 1)
    numbers = struct.unpack_from(f"<{sequences}i{sequences}q{boundaries}q", index, 34)
    sizes, pointers, starts = numbers[:sequences], numbers[sequences : 2 * sequences], numbers[2 * sequences :]
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    read = [struct.unpack_from(f"<{size}{letter}", ids, at) for size, at in zip(sizes, pointers, strict=True)]
    return [[one for sequence in read[first:stop] for one in sequence] for first, stop in pairwise(starts)]


def write_by_hand(prefix, documents, code, forgets_end=False):
    """Documents of sequences of ids; an old writer counted a document's last id in no size."""
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    sequences = [sequence for document in documents for sequence in document]
    Path(f"{prefix}.bin").write_bytes(b"".join(struct.pack(f"<{len(ids)}{letter}", *ids) for ids in sequences))
    sizes = [
        len(ids) - (forgets_end and place == len(document) - 1)
        for document in documents
        for place, ids in enumerate(document)
    ]
    pointers = [sum(sizes[:number]) * struct.calcsize(letter) for number in range(len(sizes))]
    starts = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(starts))
    numbers = struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(starts)}q", *sizes, *pointers, *starts)
    Path(f"{prefix}.idx").write_bytes(header + numbers)


@pytest.mark.parametrize("kind", [*KINDS, *COLUMNS])
def test_every_kind_gives_the_same_documents(tmp_path, kind):
    source = _write(tmp_path, kind)
    assert list(read_texts([source])) == [text for text in TEXTS if text]
    manifest = prepare([source], "bytes", tmp_path / "out")
    assert (manifest["documents"], manifest["skipped"], manifest["skipped_bad"]) == (3, 1, 0)
    assert read_by_hand(tmp_path / "out") == [[*text.encode(), 256] for text in TEXTS if text]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", "frames.jsonl.zst", ".parquet"])
@pytest.mark.parametrize("kept", [0.4, 0.9])
def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path, kind, kept):
    source = tmp_path / f"a{kind}"
    whole = Path(_write(tmp_path, kind)).read_bytes()
    source.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(UserError, match=f"a{kind}: (cannot be read|is not a Parquet file)"):
        prepare([str(source)], "bytes", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_large_compressed_file_that_is_cut_late_is_not_taken_for_a_whole_one(tmp_path):
    lines = b"".join(json.dumps({"text": f"{number} " * 50}).encode() + b"\n" for number in range(3000))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    assert len(list(read_texts([str(tmp_path / "a.jsonl.zst")]))) == 3000
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines)[:-1])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst: cannot be read \(the file ends in the middle of a frame"):
        list(read_texts([str(tmp_path / "a.jsonl.zst")]))


def test_a_long_window_is_read(tmp_path):
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=30, enable_ldm=True)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor(compression_params=settings).compress(LINES))
    assert list(read_texts([str(tmp_path / "a.jsonl.zst")])) == [text for text in TEXTS if text]


def test_a_missing_column_names_those_there_are(tmp_path):
    with pytest.raises(UserError, match="no column 'body', but text, other"):
        list(read_texts([_write(tmp_path, ".parquet")], text_key="body"))


@pytest.mark.parametrize("column", [pyarrow.array(range(3)), pyarrow.array([["a"]] * 3), pyarrow.array([{"a": "b"}])])
def test_a_column_of_no_text_is_named(tmp_path, column):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: its column 'text' holds .*, not text; --text-key"):
        list(read_texts([str(tmp_path / "a.parquet")]))


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_bad_lines_are_named_or_counted_in_every_kind(tmp_path, kind):
    lines = b'{"text": "ab"}\n{"text": "\xe6b"}\n[1]\n{"text": 5}\n\n{"text": "\\ud800"}\n{"text": "c"}'
    compress = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[kind]
    (tmp_path / f"a{kind}").write_bytes(compress(lines))
    with pytest.raises(UserError, match=f"a{kind}:2: byte 10 is not UTF-8"):
        prepare([str(tmp_path / f"a{kind}")], "bytes", tmp_path / "out")
    manifest = prepare([str(tmp_path / f"a{kind}")], "bytes", tmp_path / "out", bad_lines="skip")
    assert read_by_hand(tmp_path / "out") == [[97, 98, 256], [99, 256]]
    assert (manifest["skipped"], manifest["skipped_bad"]) == (5, 4)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_files_of_others_hold_what_they_hold_by_hand(tmp_path, code):
    documents = [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10], [], [11]]]
    write_by_hand(tmp_path / "data", documents, code)
    dataset = IndexedDataset(tmp_path / "data")
    assert [dataset.document(number).tolist() for number in range(3)] == read_by_hand(tmp_path / "data")
    assert read_by_hand(tmp_path / "data") == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11]]


def test_an_old_writer_forgot_one_token_a_document_not_a_sequence(tmp_path):
    documents = [[[1, 2, 3], [4, 0]], [[5, 0]], [[7, 8], [9], [10, 0]]]
    write_by_hand(tmp_path / "old", documents, 8, forgets_end=True)
    dataset = IndexedDataset(tmp_path / "old")
    whole = [[1, 2, 3, 4, 0], [5, 0], [7, 8, 9, 10, 0]]
    assert [dataset.document(number).tolist() for number in range(3)] == whole
    assert [dataset[number].tolist() for number in range(6)] == [ids for document in documents for ids in document]
    merge([str(tmp_path / "old"), str(tmp_path / "old")], tmp_path / "new")
    assert read_by_hand(tmp_path / "new") == whole + whole


@pytest.mark.parametrize(("codes", "dtype"), [((8, 3), np.int32), ((1, 8), np.uint16), ((8, 5), np.int64)])
def test_merged_files_hold_every_id_of_both_and_no_empty_document(tmp_path, codes, dtype):
    most = {1: 255, 3: 32767, 8: 65535, 5: 2**40}
    write_by_hand(tmp_path / "a", [[[most[codes[0]]]], [], [[]]], codes[0])
    write_by_hand(tmp_path / "b", [[[1, most[codes[1]]], [2]]], codes[1])
    manifest = merge([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "c")
    assert read_by_hand(tmp_path / "c") == [[most[codes[0]]], [1, most[codes[1]], 2]]
    assert IndexedDataset(tmp_path / "c").dtype == dtype
    assert (manifest["documents"], manifest["tokens"]) == (2, 4)
    assert "bytes" not in manifest  # of which neither says anything


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_list_of_datasets_is_its_lines(tmp_path, mark, end):
    lines = [
        b"# weights of the paper",
        b"0.25 data/wiki wiki",
        b"",
        b"  # half",
        b"5e-1\tdata/code  code",
        b"1 data/web",
    ]
    (tmp_path / "list.txt").write_bytes(mark + end.join(lines))
    words = [line.decode().split() for line in lines if line and not line.strip().startswith(b"#")]
    read = read_paths(DataConfig(file_list=str(tmp_path / "list.txt")))
    assert [(path.weight, path.prefix) for path in read] == [(Fraction(weight), prefix) for weight, prefix, *_ in words]
