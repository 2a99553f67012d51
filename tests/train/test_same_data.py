"""No rank trains on other data than the first, and no run goes on with other data than it began with."""

import os

import numpy as np
import pytest
import torch

from polarlm.config import UserError, load_run
from polarlm.data import IndexedWriter
from polarlm.data.manifest import write_manifest
from polarlm.parallel import Device, World
from polarlm.train import fit, open_run
from polarlm.train import run as run_module
from ranks import run_ranks
from train.trained import make_folder

ALONE = World(0, 1, Device(torch.device("cpu")))


def _prepare(folder, last_document=(7,) * 50, has_manifest=True):
    """A dataset `text` of 20 documents in a folder, as on a node's own disk."""
    folder.mkdir(exist_ok=True)
    with IndexedWriter(folder / "text", np.uint16) as writer:
        for number in range(19):
            writer.add_document(np.full(50, number))
        writer.add_document(np.array(last_document))
    if has_manifest:
        write_manifest(folder / "text", {})


def _digest(folder):
    return run_module.IndexedDataset(folder / "text").identity()["text.bin"]


def _config(ranks=1, data="--data.paths text"):
    words = "--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --train.seq-len 16 "
    words += f"{data} --data.split 1 0 0 --data.tokenizer bytes --train.steps 2 --parallel.ranks {ranks}"
    return load_run(None, environment={}, flags=words.split()).config


def _run_folder(path, config):
    make_folder(path, config)
    return path


def _open_on_its_own_disk(world, run, disks, data="--data.paths text"):
    os.chdir(disks[world.rank])
    run_module.short_host_name = lambda: f"node{world.rank}"
    try:
        open_run(run, _config(world.size, data), world)
    except UserError as error:
        return str(error)
    return "opened"


def _disks(tmp_path):
    return [tmp_path / "node0", tmp_path / "node1"]


def _open_on_two(tmp_path, data="--data.paths text"):
    run = _run_folder(tmp_path / "run", _config(2, data))
    return run_ranks(2, _open_on_its_own_disk, run, _disks(tmp_path), data)


def test_the_same_data_on_two_disks_is_the_same(tmp_path):
    for node in ("node0", "node1"):
        _prepare(tmp_path / node)
    assert _open_on_two(tmp_path) == ["opened", "opened"]


def test_one_changed_document_on_one_disk_ends_every_rank(tmp_path):
    _prepare(tmp_path / "node0")
    _prepare(tmp_path / "node1", last_document=(8,) * 50)
    told = _open_on_two(tmp_path)
    digests = {_digest(tmp_path / node) for node in ("node0", "node1")}
    assert len(digests) == 2
    for message in told:
        assert all(word in message for word in ("data.paths: text", "node0", "node1", *digests)), message


def test_a_cut_copy_without_a_manifest_ends_every_rank(tmp_path):
    _prepare(tmp_path / "node0", has_manifest=False)
    _prepare(tmp_path / "node1", last_document=(7,) * 49, has_manifest=False)
    assert all("'tokens': 1000" in message and "'tokens': 999" in message for message in _open_on_two(tmp_path))


def test_other_content_of_the_same_size_beside_the_same_manifest_ends_every_rank(tmp_path):
    for node in ("node0", "node1"):
        _prepare(tmp_path / node)
    (tmp_path / "node1" / "text.bin").write_bytes(bytes(2 * 1000))
    told = _open_on_two(tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith("text.bin: is not the file that text.json describes")
    assert told[0].endswith("(on node1)")


@pytest.mark.parametrize("missing", ["text.bin", "text.idx", "list.txt"])
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_data_that_is_missing_on_one_host_ends_every_rank(tmp_path, node, missing):
    for each in ("node0", "node1"):
        _prepare(tmp_path / each)
        (tmp_path / each / "list.txt").write_text("1 text corpus\n")
    (tmp_path / node / missing).unlink()
    told = _open_on_two(tmp_path, "--data.file-list list.txt")
    assert told[0] == told[1]
    assert missing in told[0]
    assert told[0].endswith(f"(on {node})")
    assert "\n" not in told[0]


def test_data_replaced_under_a_run_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _prepare(tmp_path)
    before = _digest(tmp_path)
    run = _run_folder(tmp_path / "run", _config())
    fit(open_run(run, _config(), ALONE))
    assert open_run(run, _config(), ALONE).progress.step == 2
    _prepare(tmp_path, last_document=(8,) * 50)
    with pytest.raises(UserError, match=r"data\.paths: text: the run was trained on data with") as error:
        open_run(run, _config(), ALONE)
    assert before in str(error.value)
    assert _digest(tmp_path) in str(error.value)
