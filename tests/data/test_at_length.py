"""Samples of a million tokens, documents longer than a sample, documents of one token: against a walk token by token,
and at a cost that does not grow with the dataset."""

import time
import tracemalloc

import numpy as np
import pytest

from polarlm.data import IndexedDataset, IndexedWriter, Samples, batch_of

EOD = 0
LONG = 2**20


def write(prefix, documents, dtype=np.uint16):
    with IndexedWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add_document(np.asarray(ids))
    return IndexedDataset(prefix)


def walk(documents, sample, seq_len, length):
    """What a masked batch of one sample should hold, sequence by sequence: the repeated stream taken one token after
    the other, each knowing its document; within a sequence a document begins where its first token here stands."""
    stream = [(token, name) for name, ids in enumerate(documents) for token in ids]
    rows = []
    for place in range(seq_len):
        if place % length == 0:
            rows.append({"tokens": [], "targets": [], "positions": [], "document_ids": []})
            before, position, number = None, 0, -1
        whole = sample * seq_len + place
        (token, document), (target, _) = stream[whole % len(stream)], stream[(whole + 1) % len(stream)]
        if (document, whole // len(stream)) != before:
            before, position, number = (document, whole // len(stream)), 0, number + 1
        for field, value in zip(rows[-1], (token, target, position, number), strict=True):
            rows[-1][field].append(value)
        position += 1
    return {field: [row[field] for row in rows] for field in rows[0]}


@pytest.mark.parametrize("length", [12, 4, 1])
def test_masked_samples_are_those_of_a_walk_token_by_token(tmp_path, length):
    """Each ends with its end; some are nothing but that, some are longer than several samples."""
    random = np.random.default_rng(3)
    sizes = [40, 1, 1, 1, 12, 11, 13, 24, 2, 1, 5, 30, 1]
    documents = [[*random.integers(1, 99, size=size - 1).tolist(), EOD] for size in sizes]
    samples = Samples(write(tmp_path / "data", documents), (0, len(sizes)), 12, seed=1)
    for sample in range(samples.count(epochs=3)):
        batch = batch_of(samples, [sample], mask_documents=True, seq_len=length)
        for field, expected in walk(documents, sample, 12, length).items():
            assert getattr(batch, field).tolist() == expected, (sample, field)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Three million tokens, in documents of one token and in one document."""
    folder, ids = tmp_path_factory.mktemp("long"), np.random.default_rng(1).integers(1, 2**16, size=3 * LONG)
    ones = IndexedDataset(_of_ones(folder / "ones", ids.astype(np.uint16)))
    return {"ones": ones, "whole": write(folder / "whole", [ids])}, ids


def _of_ones(prefix, ids):
    """What `IndexedWriter` writes, without three million calls."""
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(ids)
        writer._sizes.frombytes(np.ones(len(ids) - 1, np.int32).tobytes())
        writer._sizes[0] = 1
    return prefix


@pytest.mark.parametrize("name", ["ones", "whole"])
@pytest.mark.parametrize("length", [LONG, LONG // 8])
def test_a_sample_of_a_million_tokens_costs_what_it_holds(long, name, length):
    datasets, ids = long
    samples = Samples(datasets[name], (0, datasets[name].documents), LONG, seed=1)
    for mask in (False, True):
        began = time.thread_time()
        batch = batch_of(samples, [1], mask, length)
        assert time.thread_time() - began < 1.0  # 0.02 s without masks, 0.1 s with a million documents
        tracemalloc.start()
        batch_of(samples, [1], mask, length)
        assert tracemalloc.get_traced_memory()[1] < 80 * LONG  # bytes a token, at the worst moment
        tracemalloc.stop()
        assert batch.tokens.shape == (LONG // length, length)
        np.testing.assert_array_equal(batch.tokens.ravel(), ids[LONG : 2 * LONG])
        np.testing.assert_array_equal(batch.targets.ravel(), ids[LONG + 1 : 2 * LONG + 1])
        if mask:
            expected = np.arange(length) if name == "ones" else np.zeros(length)
            np.testing.assert_array_equal(batch.document_ids, np.broadcast_to(expected, batch.tokens.shape))
            np.testing.assert_array_equal(
                batch.positions, (np.arange(length) - batch.document_ids) * np.ones_like(batch.tokens)
            )


def test_opening_and_finding_do_not_grow_with_the_documents(long, monkeypatch):
    """Of three million documents: a header is read, and 2 · log2 of them are looked at for a sample of four tokens."""
    tracemalloc.start()
    dataset = IndexedDataset(long[0]["ones"].prefix)
    samples = Samples(dataset, (0, dataset.documents), 4, seed=1)
    samples.id_at(123_456), samples.tokens_of(99_999)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    looks, find = [], dataset.document_start
    monkeypatch.setattr(dataset, "document_start", lambda number: looks.append(number) or find(number))
    assert samples.document_ids(99_999).tolist() == [0, 1, 2, 3]
    assert len(looks) <= 2 * (1 + np.log2(dataset.documents))
