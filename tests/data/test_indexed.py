"""The files against a reader and a writer of a few lines each, written from the format's description alone."""

import mmap
import os
import resource
import signal
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from polarlm.config import UserError
from polarlm.data import IndexedDataset, IndexedWriter, Samples, merge, pointers_of, smallest_dtype

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # the format's dtype codes, as `struct` spells them


def read_by_hand(prefix):
    """(dtype code, sizes, pointers, document index, ids)."""
    index, ids = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, sequences, boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    numbers = struct.unpack_from(f"<{sequences}i{sequences}q{boundaries}q", index, 34)
    sizes, pointers, documents = np.split(np.array(numbers), [sequences, 2 * sequences])
    stream = struct.unpack(f"<{len(ids) // struct.calcsize(LETTERS[code])}{LETTERS[code]}", ids)
    return code, sizes.tolist(), pointers.tolist(), documents.tolist(), list(stream)


def write_by_hand(prefix, code, sequences, document_index):
    letter = LETTERS[code]
    sizes = [len(ids) for ids in sequences]
    pointers = [sum(sizes[:number]) * struct.calcsize(letter) for number in range(len(sizes))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sizes), len(document_index))
    index += struct.pack(f"<{len(sizes)}i{len(sizes)}q{len(document_index)}q", *sizes, *pointers, *document_index)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(ids)}{letter}", *ids) for ids in sequences))


def write(prefix, documents, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(np.array(ids))


def message_of(prefix):
    with pytest.raises(UserError) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.int64, 5), (np.uint8, 1)])
def test_written_files_are_what_the_format_says(tmp_path, dtype, code):
    write(tmp_path / "data", [[1, 2, 3], [255], [7, 0]], dtype)
    size = np.dtype(dtype).itemsize
    assert read_by_hand(tmp_path / "data") == (
        code,
        [3, 1, 2],
        [0, 3 * size, 4 * size],
        [0, 1, 2, 3],
        [1, 2, 3, 255, 7, 0],
    )


@pytest.mark.parametrize("code", LETTERS)
def test_files_of_others_are_read(tmp_path, code):
    sequences = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    write_by_hand(tmp_path / "data", code, sequences, [0, 2, 3, 4])  # the first document has two sequences
    dataset = IndexedDataset(tmp_path / "data")
    assert [dataset[number].tolist() for number in range(len(dataset))] == sequences
    assert [dataset.document(n).tolist() for n in range(dataset.documents)] == [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
    assert dataset.document_starts().tolist() == [dataset.document_start(n) for n in range(4)] == [0, 4, 6, 10]
    assert [dataset.document_at(place) for place in range(10)] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert dataset.read(2, 4).tolist() == [3, 4, 5, 6]
    assert dataset.tokens == 10
    assert dataset.manifest is None


def test_a_document_of_nothing_owns_no_place(tmp_path):
    write_by_hand(tmp_path / "data", 4, [[], [1, 2], [], [3], []], [0, 1, 2, 3, 4, 5])
    dataset = IndexedDataset(tmp_path / "data")
    assert [dataset.document_at(place) for place in range(3)] == [1, 1, 3]
    assert [len(dataset.document(number)) for number in range(5)] == [0, 2, 0, 1, 0]


@pytest.mark.parametrize(("vocab_size", "width"), [(65535, 2), (65536, 2), (65537, 4), (119547, 4)])
def test_the_largest_id_comes_back_as_itself(tmp_path, vocab_size, width):
    write(tmp_path / "data", [[0, vocab_size - 1]], smallest_dtype(vocab_size))
    assert IndexedDataset(tmp_path / "data")[0].tolist() == [0, vocab_size - 1]
    assert (tmp_path / "data.bin").stat().st_size == 2 * width
    assert read_by_hand(tmp_path / "data")[0] == {2: 8, 4: 4}[width]


@pytest.mark.parametrize("ids", [[65536], [70000, 1], [-1], []])
def test_an_id_is_never_wrapped(tmp_path, ids):
    with pytest.raises(ValueError, match=r"do not fit uint16|at least one id"):
        write(tmp_path / "data", [[1], ids])
    assert list(tmp_path.iterdir()) == []


def test_pointers_outgrow_32_bits():
    sizes = np.full(4, 400_000_000, np.int32)
    assert pointers_of(sizes, 4).tolist() == [0, 1_600_000_000, 3_200_000_000, 4_800_000_000]
    assert pointers_of(np.zeros(0, np.int32), 4).tolist() == []


def test_ids_beyond_4_gb_are_read(tmp_path):
    """A file of holes: it takes no room on the disk."""
    sizes = [500_000_000, 500_000_000, 500_000_000]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4)
    index += struct.pack("<3i3q4q", *sizes, 0, 2_000_000_000, 4_000_000_000, 0, 1, 2, 3)
    (tmp_path / "data.idx").write_bytes(index)
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(6_000_000_000)
        file.seek(4 * 1_250_000_000)
        file.write(struct.pack("<2i", 70_000, 70_001))
    dataset = IndexedDataset(tmp_path / "data")
    assert dataset.read(1_250_000_000, 3).tolist() == [70_000, 70_001, 0]
    assert dataset[2][250_000_000:250_000_002].tolist() == [70_000, 70_001]
    assert dataset.document_at(1_250_000_000) == 2
    assert dataset.tokens == 1_500_000_000


def test_no_array_is_copied(tmp_path):
    """Half a million documents have an index of 10 MB; opening them and finding a sample takes next to none of it."""
    documents = 500_000
    with (tmp_path / "data.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        file.write(np.full(documents, 10, np.int32).tobytes())
        file.write((np.arange(documents) * 20).tobytes() + np.arange(documents + 1).tobytes())
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(20 * documents)
    tracemalloc.start()
    dataset = IndexedDataset(tmp_path / "data")
    samples = Samples(dataset, (1000, documents), seq_len=64, seed=1)
    assert samples.document_ids(70_000)[-1] == 6
    assert len(samples.tokens_of(samples.id_at(70_000))) == 65
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    for array in (dataset.sizes, dataset.pointers, dataset.document_index, dataset[3], dataset.document(4)):
        while isinstance(array, np.ndarray):
            array = array.base
        assert isinstance(array, mmap.mmap)


def test_no_documents(tmp_path):
    write(tmp_path / "data", [])
    dataset = IndexedDataset(tmp_path / "data")
    assert (len(dataset), dataset.documents, dataset.tokens) == (0, 0, 0)


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    write(tmp_path / "data", [[1, 2]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def documents():
        yield [3]
        assert {path.name: path.read_bytes() for path in tmp_path.glob("data.*")} == before
        raise KeyError

    with pytest.raises(KeyError):
        write(tmp_path / "data", documents())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["data", "with [brackets]*"])
def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path, name):
    for left in (".bin.77.partial", ".idx.77.partial", ".json.77.partial"):
        (tmp_path / f".{name}{left}").write_bytes(b"cut")
    (tmp_path / f".other{name}.bin.77.partial").write_bytes(b"of another output")
    with IndexedWriter(tmp_path / name, np.uint16) as first:
        mine = tmp_path / f".{name}.bin.{os.getpid()}.partial"
        living = mine.rename(tmp_path / f".{name}.bin.78.partial")  # as if another process wrote it
        write(tmp_path / name, [[1, 2]])
        assert sorted(path.name for path in tmp_path.glob(".*")) == sorted(
            [living.name, f".other{name}.bin.77.partial"]
        )
        living.rename(mine)
        first.add_document(np.array([3]))
    assert IndexedDataset(tmp_path / name)[0].tolist() == [3]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """The disk is a limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"data: cannot be written \(.*File too large"):
            write(tmp_path / "data", [[1] * 1000] * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_new_files_do_not_keep_an_old_manifest(tmp_path):
    write(tmp_path / "data", [[1, 2]])
    (tmp_path / "data.json").write_text('{"tokens": 2}')
    assert IndexedDataset(tmp_path / "data").manifest == {"tokens": 2}
    write(tmp_path / "data", [[1, 2, 3]])
    assert IndexedDataset(tmp_path / "data").manifest is None


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/data: cannot be written"):
        write(tmp_path / "file" / "data", [[1]])


def test_missing_files_say_what_makes_them(tmp_path):
    assert "data.paths" in message_of(tmp_path / "data")
    assert "data.idx is not there; `polarlm data prepare` makes it" in message_of(tmp_path / "data")
    write(tmp_path / "data", [[1]])
    (tmp_path / "data.bin").unlink()
    assert "data.bin is not there" in message_of(tmp_path / "data")


def replace_bytes(path, at, new):
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"PK", "does not begin as a Megatron index"),
        (9, b"\2", "version 2"),
        (17, b"\7", "dtype code 7"),  # floats are no ids
        (18, struct.pack("<Q", 4), "its header promises"),
        (18, struct.pack("<Q", 2**60), "its header promises"),
        (34 + 2 * 4, struct.pack("<i", 5), "its index accounts for"),  # the last size
        (34 + 3 * 12 + 3 * 8, struct.pack("<q", 2), "from sequence 0 to 2, not from 0 to 3"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, at, new, message):
    write(tmp_path / "data", [[1, 2], [3], [4, 5]])
    replace_bytes(tmp_path / "data.idx", at, new)
    said = message_of(tmp_path / "data")
    assert message in said
    assert str(tmp_path / "data") in said


@pytest.mark.parametrize("kept", [0, 5, 33, 34, 60])
def test_a_cut_index_is_refused(tmp_path, kept):
    write(tmp_path / "data", [[1, 2], [3], [4, 5]])
    path = tmp_path / "data.idx"
    path.write_bytes(path.read_bytes()[:kept])
    assert str(path) in message_of(tmp_path / "data")


@pytest.mark.parametrize("length", [0, 9, 11, 12])
def test_ids_of_another_index_are_refused(tmp_path, length):
    write(tmp_path / "data", [[1, 2], [3], [4, 5]])
    (tmp_path / "data.bin").write_bytes(bytes(length))
    assert f"data.bin: has {length} bytes and its index accounts for 10" in message_of(tmp_path / "data")


def test_ids_that_the_index_does_not_account_for_are_found_out(tmp_path):
    write_by_hand(tmp_path / "data", 8, [[1, 2], [3]], [0, 1, 2])
    (tmp_path / "data.bin").write_bytes(struct.pack("<4H", 1, 2, 99, 3))
    assert "the two do not belong together" in message_of(tmp_path / "data")


def test_a_manifest_that_is_not_json_is_named(tmp_path):
    write(tmp_path / "data", [[1]])
    (tmp_path / "data.json").write_text("{")
    assert "data.json: is not a manifest" in message_of(tmp_path / "data")


def _write_as_an_old_writer(prefix, documents, end):
    """Sizes and pointers that leave out the end-of-document token that the ids do have."""
    ids = np.concatenate([[*document, end] for document in documents]).astype("<u2")
    sizes = np.array([len(document) for document in documents], "<i4")
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype("<i8") * 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
    index = np.arange(len(sizes) + 1, dtype="<i8")
    Path(f"{prefix}.bin").write_bytes(ids.tobytes())
    Path(f"{prefix}.idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + index.tobytes())


def test_files_of_a_writer_that_forgot_the_end_of_document_token(tmp_path, caplog):
    documents = [[1, 2, 3], [4], [5, 6]]
    _write_as_an_old_writer(tmp_path / "old", documents, end=9)
    dataset = IndexedDataset(tmp_path / "old")
    assert [dataset.document(number).tolist() for number in range(3)] == [[*document, 9] for document in documents]
    assert "end-of-document token" in caplog.text


def test_merged_datasets_are_their_documents_in_turn(tmp_path):
    for name, documents in (("a", [[1, 2], [3]]), ("b", [[70000, 4]])):
        with IndexedWriter(tmp_path / name, np.int32 if name == "b" else np.uint16) as writer:
            for document in documents:
                writer.add_document(np.array(document))
    manifest = merge([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path / "c")
    merged = IndexedDataset(tmp_path / "c")
    assert [merged.document(number).tolist() for number in range(3)] == [[1, 2], [3], [70000, 4]]
    assert (manifest["documents"], manifest["tokens"]) == (3, 5)
    assert merged.manifest == manifest
