"""A dataset's files are known again by the manifest that describes them."""

import hashlib
import json

import numpy as np
import pytest

from polarlm.config import UserError
from polarlm.data import IndexedDataset, IndexedWriter
from polarlm.data.manifest import compare_whole, write_manifest

TOKENS = 500_000  # two bytes each: far more than the blocks that are sampled


@pytest.fixture
def data(tmp_path):
    _write(tmp_path / "data")
    write_manifest(tmp_path / "data", {"documents": 2})
    return tmp_path / "data"


def _write(prefix, sizes=(TOKENS - 10, 10)):
    with IndexedWriter(prefix, np.uint16) as writer:
        for size in sizes:
            writer.add_document(np.arange(size) % 60_000)


def _change(path, at):
    """One byte."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _entries(data):
    return json.loads(data.with_suffix(".json").read_text())["files"]


def test_it_says_size_digest_and_the_digest_of_evenly_spread_blocks(data):
    for name, entry in _entries(data).items():
        content = data.with_name(name).read_bytes()
        sample = content
        if len(content) > 16 * 4096:
            sample = b"".join(content[n * (len(content) - 4096) // 15 :][:4096] for n in range(16))
        assert entry == {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "sample_sha256": hashlib.sha256(sample).hexdigest(),
        }


@pytest.mark.parametrize("at", [0, 2 * TOKENS - 1, (2 * TOKENS - 4096) // 15])
def test_a_change_in_a_sampled_block_is_told_at_opening(data, at):
    _change(data.with_suffix(".bin"), at)
    with pytest.raises(
        UserError, match=r"data\.bin: is not the file that .*data\.json describes, by its sample_sha256"
    ):
        IndexedDataset(data)


def test_other_ids_of_the_same_size_are_told_at_opening(data):
    data.with_suffix(".bin").write_bytes(np.random.default_rng(1).bytes(2 * TOKENS))
    with pytest.raises(UserError, match=r"data\.bin: is not the file"):
        IndexedDataset(data)


def test_another_index_is_told_at_opening(data):
    _write(data.with_name("other"), (TOKENS - 20, 20))
    data.with_name("other.idx").replace(data.with_suffix(".idx"))
    with pytest.raises(UserError, match=r"data\.idx: is not the file"):
        IndexedDataset(data)


def test_files_of_another_size_are_told_though_they_belong_together(data):
    _write(data.with_name("other"), (7,))
    for suffix in (".bin", ".idx"):
        data.with_name(f"other{suffix}").replace(data.with_suffix(suffix))
    with pytest.raises(UserError, match=r"data\.bin: is not the file .* by its size: 14, not 1000000"):
        IndexedDataset(data)


def test_a_change_between_the_blocks_takes_the_whole_digest(data):
    compare_whole(data, IndexedDataset(data).manifest)
    _change(data.with_suffix(".bin"), 4096)
    dataset = IndexedDataset(data)
    with pytest.raises(UserError, match=r"data\.bin: is not the file .* by its sha256"):
        compare_whole(data, dataset.manifest)


def test_a_renamed_dataset_is_still_known(data):
    renamed = [data.with_suffix(suffix).rename(data.with_name(f"new{suffix}")) for suffix in (".bin", ".idx", ".json")]
    assert IndexedDataset(data.with_name("new")).documents == 2
    _change(renamed[0], 0)
    with pytest.raises(UserError, match=r"new\.bin: is not the file that .*new\.json describes"):
        IndexedDataset(data.with_name("new"))


def test_an_older_manifest_without_samples_goes_on_loading(data):
    files = _entries(data)
    for entry in files.values():
        del entry["sample_sha256"]
    data.with_suffix(".json").write_text(json.dumps({"files": files}))
    assert IndexedDataset(data).manifest == {"files": files}
    _change(data.with_suffix(".bin"), 0)
    assert IndexedDataset(data).documents == 2
    with pytest.raises(UserError, match=r"by its sha256"):
        compare_whole(data, {"files": files})


def test_without_a_manifest_there_is_nothing_to_compare_with(data):
    data.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"data\.json: is not there"):
        compare_whole(data, IndexedDataset(data).manifest)
