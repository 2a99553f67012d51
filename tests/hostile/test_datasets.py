"""A dataset from a stranger: the documents that another reader finds in the same files, or one line."""

import json
import os
import random
import shutil
import struct
from itertools import pairwise

import numpy as np
import pytest

from hostile.mutations import JSON_VALUES, MUTANTS, REFUSED, changed_bytes, changed_json, outcome_of
from polarlm.cli import main
from polarlm.config import DataConfig, UserError
from polarlm.data import (
    IndexedDataset,
    IndexedWriter,
    Loader,
    check_tokenizer,
    load_tokenizer,
    open_split,
    tokenizer_of,
)
from polarlm.data.manifest import write_manifest

VOCABULARY = 257
LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
HEADER = struct.Struct("<9sQBQQ")
EXTREMES = [0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def _write(prefix, with_manifest=True):
    chance = random.Random(5)
    documents = [[chance.randrange(256) for _ in range(chance.randrange(1, 40))] + [256] for _ in range(30)]
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(np.array(document))
    if with_manifest:
        tokenizer = {"path": "bytes", "digest": load_tokenizer("bytes").digest, "vocab_size": 257, "eod_id": 256}
        write_manifest(prefix, {"documents": 30, "tokens": sum(map(len, documents)), "tokenizer": tokenizer})
    return documents


def _read_by_hand(prefix):
    """The documents, each the sequences between its boundaries, each of those from its own place."""
    index, ids = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    _, _, code, count, boundaries = HEADER.unpack_from(index)
    numbers = struct.unpack_from(f"<{count}i{count}q{boundaries}q", index, HEADER.size)
    sizes, pointers, documents = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    sequences = [
        struct.unpack_from(f"<{size}{LETTERS[code]}", ids, at) for size, at in zip(sizes, pointers, strict=True)
    ]
    return [[one for sequence in sequences[first:stop] for one in sequence] for first, stop in pairwise(documents)]


def _use(prefix):
    """Every document, and the samples of every part, as a run and the commands take them."""
    data = DataConfig(paths=[str(prefix)], split=[60, 20, 20], mask_documents=True)
    for which in ("train", "validation"):
        samples = open_split(data, 8, 1, which, VOCABULARY)
        for number in range(samples.count()):
            tokens, documents = samples.tokens_of(samples.id_at(number)), samples.document_ids(number)
            assert tokens.shape == (9,)
            assert documents.shape == (8,)
            assert 0 <= tokens.min() <= tokens.max() < VOCABULARY
    dataset = IndexedDataset(prefix)
    if dataset.manifest is not None:
        named = tokenizer_of(data)
        check_tokenizer(data, load_tokenizer(named), named)
    dataset.identity()
    dataset.document_starts()
    return [dataset.document(number).tolist() for number in range(dataset.documents)]


def _changed_index(content, chance):
    """One number of the index, of the header's or another, made an extreme one."""
    changed = bytearray(content)
    fields = [("<Q", 9), ("<B", 17), ("<Q", 18), ("<Q", 26)]
    (count,) = struct.unpack_from("<Q", content, 18)
    places = [("<I", HEADER.size + 4 * number) for number in range(count)]
    places += [("<Q", at) for at in range(HEADER.size + 4 * count, len(content) - 7, 8)]
    kind, at = chance.choice(fields if chance.random() < 0.3 else places)
    largest = 2 ** (8 * struct.calcsize(kind)) - 1
    struct.pack_into(kind, changed, at, min(largest, chance.choice(EXTREMES)))
    return bytes(changed)


def _spoil(path, chance):
    content = path.read_bytes()
    if path.suffix == ".json":
        mutate = changed_json if chance.random() < 0.7 else changed_bytes
    else:
        mutate = _changed_index if path.suffix == ".idx" and chance.random() < 0.6 else changed_bytes
    path.write_bytes(mutate(content, chance))


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("is_read_whole", [True, False])
def test_mutated_datasets(with_manifest, is_read_whole, tmp_path, monkeypatch, capsys):
    if not is_read_whole:
        monkeypatch.setattr("polarlm.data.indexed._CHECKED_BYTES", 0)
    prefix = tmp_path / "data"
    documents = _write(prefix, with_manifest)
    places = (prefix, f"data.paths: {prefix}", "data.tokenizer: ", "data.split: ", "model.vocab_size: ")
    places += (
        "x: ",
        "../../secret: ",
        "/etc/passwd: ",
        "a\\x00b: ",
        "line\\nbreak",
        "aaaa",
        ".: ",
    )  # no tokenizer there
    kinds = ["idx", "idx", "bin", "json"] if with_manifest else ["idx", "idx", "bin"]
    assert _use(prefix) == _read_by_hand(prefix) == documents
    chance, refused = random.Random(2), 0
    for _ in range(MUTANTS // 2):
        victim = prefix.with_suffix(f".{chance.choice(kinds)}")
        before = victim.read_bytes()
        _spoil(victim, chance)
        found = outcome_of(lambda: _use(prefix), *places)
        words = ["data", "inspect", str(prefix), "--tokenizer", "bytes"]
        assert main(words) in ((0,) if found is not REFUSED else (0, 2))
        if found is REFUSED:
            refused += 1
        else:
            assert found == (documents if with_manifest else _read_by_hand(prefix))
            assert victim.suffix == ".json" or victim.read_bytes() == before or not with_manifest
        victim.write_bytes(before)
    assert MUTANTS // 8 < refused < MUTANTS // 2
    assert _use(prefix) == documents


def _index(**changes):
    """Spoils the index: other values for `sequences`, `boundaries`, `version`, `code`; or, at a place, of an array."""

    def spoil(prefix):
        path = prefix.with_suffix(".idx")
        content = bytearray(path.read_bytes())
        magic, version, code, count, boundaries = HEADER.unpack_from(content)
        arrays = {"sizes": ("<i", HEADER.size), "pointers": ("<q", HEADER.size + 4 * count)}
        arrays["documents"] = ("<q", HEADER.size + 12 * count)
        for array, (kind, start) in arrays.items():
            for number, value in changes.get(array, {}).items():
                struct.pack_into(kind, content, start + struct.calcsize(kind) * number, value)
        header = {"version": version, "code": code, "sequences": count, "boundaries": boundaries}
        HEADER.pack_into(content, 0, magic, *(changes.get(name, value) for name, value in header.items()))
        path.write_bytes(content)

    return spoil


def _manifest(**changes):
    def spoil(prefix):
        path = prefix.with_suffix(".json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def _file(**changes):
    def spoil(prefix):
        files = json.loads(prefix.with_suffix(".json").read_text())["files"]
        _manifest(files={name: entry | changes for name, entry in files.items()})(prefix)

    return spoil


def _instead(suffix, content):
    return lambda prefix: prefix.with_suffix(suffix).write_bytes(content)


def _all_bits(prefix):
    path = prefix.with_suffix(".bin")
    path.write_bytes(b"\xff" * path.stat().st_size)


BY_ITS_MAKER = {  # what can be done to a dataset without a manifest -> what is said
    "an index of terabytes": (_index(sequences=2**40), "where its header promises"),
    "an index of more than 64 bits": (_index(sequences=2**64 - 1, boundaries=2**64 - 1), "where its header promises"),
    "another version": (_index(version=2**40), "version 1099511627776"),
    "floats for ids": (_index(code=6), "dtype code 6"),
    "no index": (_instead(".idx", b""), "does not begin as a Megatron index does"),
    "no ids": (_instead(".bin", b""), "has 0 bytes and its index accounts for"),
    "a size below 0": (_index(sizes={3: -1}), "its sequences do not lie one after the other"),
    "a pointer below 0": (_index(pointers={3: -2}), "its sequences do not lie one after the other"),
    "a pointer beyond the ids": (_index(pointers={3: 2**62}), "its sequences do not lie one after the other"),
    "a pointer into the middle of an id": (_index(pointers={3: 77}), "its sequences do not lie one after the other"),
    "a first pointer that is not 0": (_index(pointers={0: 2}), "its sequences do not lie one after the other"),
    "documents in no order": (_index(documents={3: 29, 4: 2}), "its documents are not in order"),
    "a document beyond the sequences": (_index(documents={3: 2**40}), "its documents are not in order"),
    "a document before the sequences": (_index(documents={3: -(2**63)}), "its documents are not in order"),
    "documents that begin late": (_index(documents={0: 1}), "its documents run from sequence 1"),
    "ids beyond the vocabulary": (_all_bits, "holds ids from 65535 to 65535"),
    "ids below 0": (lambda prefix: (_index(code=3)(prefix), _all_bits(prefix)), "holds ids from -1 to -1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_ITS_MAKER)
def test_what_its_maker_can_do_to_a_dataset(kind, tmp_path):
    spoil, said = BY_ITS_MAKER[kind]
    _write(tmp_path / "data", with_manifest=False)
    spoil(tmp_path / "data")
    with pytest.raises(UserError) as refusal:
        _use(tmp_path / "data")
    assert said in str(refusal.value)
    assert outcome_of(lambda: _use(tmp_path / "data"), tmp_path, f"data.paths: {tmp_path}") is REFUSED


@pytest.mark.parametrize(
    "kind", ["a pointer beyond the ids", "a document beyond the sequences", "documents in no order"]
)
def test_an_index_too_large_to_read_is_refused_where_it_is_used_and_by_check(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polarlm.data.indexed._CHECKED_BYTES", 0)
    _write(tmp_path / "data", with_manifest=False)
    BY_ITS_MAKER[kind][0](tmp_path / "data")
    dataset = IndexedDataset(tmp_path / "data")
    with pytest.raises(UserError, match=r"data\.idx: .*; the file is damaged, prepare the data again"):
        [dataset.document(number) for number in range(dataset.documents)]
    assert main(["data", "check", str(tmp_path / "data")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_ids_beyond_the_vocabulary_reach_the_training_loop_as_one_line(tmp_path):
    _write(tmp_path / "data", with_manifest=False)
    samples = open_split(DataConfig(paths=[str(tmp_path / "data")], split=[1, 0, 0]), 8, 1, "train", 200)
    loader = Loader(samples, global_batch_size=8, micro_batch_size=8, rank=0, ranks=1, start_sample=0)
    with loader, pytest.raises(UserError, match=r"data\.bin: holds ids from .*model\.vocab_size is 200"):
        next(loader)


MANIFESTS = {
    **{f"the manifest {value[:20]}": (_instead(".json", value.encode()), "") for value in JSON_VALUES if value != "{}"},
    "no UTF-8": (_instead(".json", b'{"tokens": "\xff"}'), "can't decode"),
    "gigabytes": (lambda prefix: os.truncate(prefix.with_suffix(".json"), 2**24 + 1), "is larger than the 16777216"),
    "files in a list": (_manifest(files=[]), "`files` should be"),
    "a size that is a text": (_file(size="5"), ".size` should be a valid integer"),
    "a size of 1e300": (_file(size=1e300), ".size` should be a valid integer"),
    "a digest that is a list": (_file(sha256=[]), ".sha256` should be a valid string"),
    "another digest": (_file(sample_sha256="0"), "by its sample_sha256"),
    "a tokenizer that is a text": (_manifest(tokenizer="tok"), "`tokenizer` should be"),
    "a tokenizer's path that is a list": (_manifest(tokenizer={"path": ["a"]}), "`tokenizer.path` should be"),
    "a vocabulary that is a text": (_manifest(tokenizer={"vocab_size": "9"}), "`tokenizer.vocab_size` should be"),
    "a vocabulary below 0": (_manifest(tokenizer={"path": "bytes", "vocab_size": -1}), "`tokenizer.vocab_size`"),
    "a vocabulary larger than the model's": (_manifest(tokenizer={"vocab_size": 10**9}), "is less than"),
    "tokens that are a text": (_manifest(tokens="many"), "`tokens` should be"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_of_any_kind(kind, tmp_path, capsys):
    spoil, said = MANIFESTS[kind]
    _write(tmp_path / "data")
    spoil(tmp_path / "data")
    with pytest.raises(UserError) as refusal:
        _use(tmp_path / "data")
    assert said in str(refusal.value)
    assert outcome_of(lambda: _use(tmp_path / "data"), tmp_path, "model.vocab_size", "data.tokenizer: ") is REFUSED


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_link_out_of_a_datasets_folder_is_refused(suffix, tmp_path):
    (tmp_path / "inside").mkdir()
    prefix = tmp_path / "inside/data"
    _write(prefix)
    file = prefix.with_suffix(suffix)
    shutil.move(file, tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=rf"data\{suffix}: leads to .*secret, outside of its folder"):
        _use(prefix)
    file.unlink()
    shutil.move(tmp_path / "secret", tmp_path / "inside/other")
    file.symlink_to("other")
    assert len(_use(prefix)) == 30


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_pipe_or_a_folder_is_no_part_of_a_dataset(suffix, tmp_path):
    _write(tmp_path / "data")
    file = (tmp_path / "data").with_suffix(suffix)
    file.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(file)
        with pytest.raises(UserError, match=rf"data\{suffix}"):
            _use(tmp_path / "data")
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def test_data_is_not_read_with_another_tokenizer_than_it_was_prepared_with(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "data")
    _manifest(tokenizer={"path": "bytes", "digest": "0" * 64, "vocab_size": 257})(tmp_path / "data")
    shape = "--model.layers 1 --model.hidden 8 --model.heads 2 --train.seq-len 8 --train.steps 1 --show-config"
    for words in (f"train {shape} --data.paths data", "data inspect data"):
        assert main(words.split()) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith(
            ("error: data.tokenizer: bytes is another than data", "error: bytes: is another tokenizer")
        )
