"""Text to `.bin/.idx`: read back by a few lines written from the format's description alone."""

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from polarlm.config import UserError
from polarlm.data import IndexedDataset, load_tokenizer, prepare, train_tokenizer

EOD = 256  # of the tokenizer `bytes`


def read_by_hand(prefix) -> list[list[int]]:
    """The documents' ids, uint16."""
    index, stream = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    magic, version, code, sequences, boundaries = struct.unpack("<9sQBQQ", index[:34])
    assert (magic, version, code, boundaries) == (b"MMIDIDX\0\0", 1, 8, sequences + 1)
    sizes = np.frombuffer(index, "<i4", sequences, 34)
    pointers = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences)
    assert index[34 + 12 * sequences :] == np.arange(sequences + 1, dtype="<i8").tobytes()
    return [np.frombuffer(stream, "<u2", *where).tolist() for where in zip(sizes, pointers, strict=True)]


def write_lines(path, texts):
    path.write_bytes(b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts))
    return [str(path)]


def ids_of(text: str) -> list[int]:
    return [*text.encode(), EOD]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 4 MB in lines and files, so that several chunks are in flight; some documents are empty."""
    folder, drawn = tmp_path_factory.mktemp("corpus"), random.Random(1)
    words = ["alpha", "beta\n", "γάμμα", "    def f(x):", "<|endoftext|>", "1234", "\u2028"]
    texts = [" ".join(drawn.choices(words, k=drawn.choice([0, 3, 300]))) for _ in range(4000)]
    write_lines(folder / "lines.jsonl", texts)
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(drawn.choices(words, k=5000)), encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("empty_at", [0, 1, 2])
def test_documents_are_written_one_by_one_and_empty_ones_counted(tmp_path, workers, empty_at):
    texts = ["ab", "  "]
    texts.insert(empty_at, "")
    manifest = prepare(write_lines(tmp_path / "a.jsonl", texts), "bytes", tmp_path / "out", workers=workers)
    assert read_by_hand(tmp_path / "out") == [ids_of("ab"), ids_of("  ")]
    assert (manifest["documents"], manifest["skipped"], manifest["bytes"], manifest["tokens"]) == (2, 1, 4, 6)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_line_separator_of_unicode_parts_is_one_document(tmp_path, workers):
    text = "one\u2028two\u2029three\u0085four"
    prepare(write_lines(tmp_path / "a.jsonl", [text]), "bytes", tmp_path / "out", workers=workers)
    assert read_by_hand(tmp_path / "out") == [ids_of(text)]


def test_any_number_of_workers_writes_the_same_bytes(corpus, tmp_path):
    train_tokenizer(["alpha beta γάμμα def f(x): "], 300, tmp_path / "tokenizer")
    written = []
    for workers in (1, 2, 3):
        prefix = tmp_path / str(workers) / "out"
        prepare([str(corpus)], str(tmp_path / "tokenizer"), prefix, workers=workers)
        written.append([prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx", ".json")])
    assert written[0] == written[1] == written[2]
    assert IndexedDataset(tmp_path / "1" / "out").documents > 2000


def test_each_document_ends_once_even_where_it_spells_the_end(tmp_path):
    tokenizer = train_tokenizer(["some <|endoftext|> text"], 270, tmp_path / "tokenizer")
    texts = ["a <|endoftext|> b", "c", "<|endoftext|>"]
    prepare(write_lines(tmp_path / "a.jsonl", texts), str(tmp_path / "tokenizer"), tmp_path / "out")
    documents = read_by_hand(tmp_path / "out")
    assert [ids[-1] for ids in documents] == [tokenizer.eod_id] * 3
    assert sum(ids.count(tokenizer.eod_id) for ids in documents) == 3
    assert [tokenizer.decode(ids) for ids in documents] == texts


def test_documents_may_go_without_an_end(tmp_path):
    prepare(write_lines(tmp_path / "a.jsonl", ["ab", "c"]), "bytes", tmp_path / "out", append_eod=False)
    assert read_by_hand(tmp_path / "out") == [list(b"ab"), list(b"c")]


def endless_tokenizer(folder, size: int = 1) -> str:
    engine = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_tokenizer_without_an_end_is_refused_before_anything_is_written(tmp_path):
    inputs, tokenizer = write_lines(tmp_path / "a.jsonl", ["ab"]), endless_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"tokenizer: has no end-of-document token.*--no-append-eod"):
        prepare(inputs, tokenizer, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()
    prepare(inputs, tokenizer, tmp_path / "out", append_eod=False)


@pytest.mark.parametrize(("size", "width"), [(65536, 2), (65537, 4), (119547, 4)])
def test_ids_beyond_16_bits_get_32(tmp_path, size, width):
    tokenizer = endless_tokenizer(tmp_path / "tokenizer", size)
    prepare(write_lines(tmp_path / "a.jsonl", [f"w{size - 1}"]), tokenizer, tmp_path / "out", append_eod=False)
    assert int.from_bytes((tmp_path / "out.bin").read_bytes(), "little") == size - 1
    assert (tmp_path / "out.bin").stat().st_size == width


def test_the_manifest_describes_what_lies_there(tmp_path):
    inputs = write_lines(tmp_path / "a.jsonl", ["é", "", "bc"])
    manifest = prepare(inputs, "bytes", tmp_path / "out")
    tokenizer = load_tokenizer("bytes")
    assert manifest == json.loads((tmp_path / "out.json").read_text()) == IndexedDataset(tmp_path / "out").manifest
    assert manifest["tokenizer"] == {"path": "bytes", "digest": tokenizer.digest, "vocab_size": 257, "eod_id": 256}
    assert (manifest["documents"], manifest["tokens"], manifest["bytes"]) == (2, 6, 4)
    for name in ("out.bin", "out.idx"):
        content = (tmp_path / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()  # a small file's sample is all of it
        assert manifest["files"][name] == {"size": len(content), "sha256": digest, "sample_sha256": digest}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_leaves_what_was_there_or_is_counted(tmp_path, workers):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ab"}\n{"text": "\xe6b"}\n{"text": "c"}\n')
    prepare(write_lines(tmp_path / "old.jsonl", ["old"]), "bytes", tmp_path / "out")
    with pytest.raises(UserError, match=r"a\.jsonl:2: .*UTF-8"):
        prepare([str(path)], "bytes", tmp_path / "out", workers=workers)
    assert read_by_hand(tmp_path / "out") == [ids_of("old")]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a.jsonl",
        "old.jsonl",
        "out.bin",
        "out.idx",
        "out.json",
    ]

    manifest = prepare([str(path)], "bytes", tmp_path / "out", workers=workers, bad_lines="skip")
    assert read_by_hand(tmp_path / "out") == [ids_of("ab"), ids_of("c")]
    assert (manifest["skipped"], manifest["skipped_bad"]) == (1, 1)


def test_no_text_leaves_nothing(tmp_path):
    inputs = write_lines(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(UserError, match=r"no text in there \(2 empty and 0 bad documents\)"):
        prepare(inputs, "bytes", tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def start_preparing(inputs, prefix, workers):
    words = ["data", "prepare", *inputs, "--tokenizer", "bytes", "--output", str(prefix), "--workers", str(workers)]
    return subprocess.Popen([sys.executable, "-m", "polarlm", *words], stderr=subprocess.PIPE, start_new_session=True)


def wait_for(what, seconds: float = 20.0):
    """Poll `what` until it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.01)
    return pytest.fail("waited in vain")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_preparation_that_is_ended_leaves_nothing_that_looks_whole_and_no_worker(tmp_path, how):
    inputs = write_lines(tmp_path / "a.jsonl", ["some text " * 1000] * 6000)
    process = start_preparing(inputs, tmp_path / "out", workers=3)
    wait_for(lambda: [file for file in tmp_path.glob(".out.bin*") if file.stat().st_size])
    assert len(workers_of(process.pid)) == 3
    # Ctrl-C reaches every process in front of the terminal, the others the one they are sent to.
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
    _, message = process.communicate(timeout=20)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert b"Traceback" not in message
    with pytest.raises(UserError, match="is not there"):
        IndexedDataset(tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    wait_for(lambda: not group_is_alive(process.pid))
    left = [file.name for file in tmp_path.iterdir() if file.name != "a.jsonl"]
    assert left == ([] if how == signal.SIGINT else [f".out.bin.{process.pid}.partial"])
    prepare(write_lines(tmp_path / "a.jsonl", ["ab"]), "bytes", tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx", "out.json"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_worker_is_one_line_and_leaves_nothing(tmp_path, how):
    inputs = write_lines(tmp_path / "a.jsonl", ["some text " * 1000] * 6000)
    process = start_preparing(inputs, tmp_path / "out", workers=2)
    os.kill(wait_for(lambda: workers_of(process.pid))[0], how)
    _, message = process.communicate(timeout=20)
    assert message == b"error: a worker ended early, killed perhaps for want of memory; use fewer --workers\n"
    assert process.returncode == 2
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]
    wait_for(lambda: not group_is_alive(process.pid))


def workers_of(parent: int) -> list[int]:
    children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_memory_does_not_grow_with_the_input(tmp_path):
    def peak_of(documents: int) -> int:
        inputs = write_lines(tmp_path / f"{documents}.jsonl", ["some text " * 1000] * documents)
        process = start_preparing(inputs, tmp_path / "out", workers=1)
        _, status, usage = os.wait4(process.pid, 0)
        process.stderr.close()
        assert status == 0
        return usage.ru_maxrss * 1024

    small, large = peak_of(400), peak_of(4000)
    assert large - small < 10e6  # of 36 MB more of text


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
