"""Samples against the endlessly repeated split, written out as a list; the permutation against what chance gives."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from polarlm.config import UserError
from polarlm.data import IndexedDataset, IndexedWriter, Samples, SyntheticSamples, permute, split_documents


def dataset_of(folder, sizes):
    """Documents of these sizes; the ids of the stream count from 0, so that an id says where it is from."""
    with IndexedWriter(folder / "data", np.int32) as writer:
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            writer.add_document(np.arange(stop - size, stop))
    return IndexedDataset(folder / "data")


SHAPES = [  # sizes of all documents, range of the split, sequence length
    ([3, 1, 4, 1, 5, 9, 2, 6], (0, 8), 4),
    ([3, 1, 4, 1, 5, 9, 2, 6], (2, 6), 4),  # 19 tokens
    ([3, 1, 4, 1, 5, 9, 2, 6], (7, 8), 5),  # a split of one document, of one sample and no token more
    ([3, 1, 4, 1, 5, 9, 2, 6], (0, 8), 1),
    ([10, 2], (0, 2), 4),  # T is a multiple of s
    ([7], (0, 1), 6),
]


@pytest.mark.parametrize(("sizes", "documents", "seq_len"), SHAPES)
def test_samples_are_windows_of_the_repeated_split(tmp_path, sizes, documents, seq_len):
    samples = Samples(dataset_of(tmp_path, sizes), documents, seq_len, seed=1)
    first, stop = sum(sizes[: documents[0]]), sum(sizes[: documents[1]])
    assert samples.tokens == stop - first
    repeated = [*range(first, stop)] * 5
    for sample in range(4 * samples.tokens // seq_len):
        tokens = samples.tokens_of(sample)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == repeated[sample * seq_len : sample * seq_len + seq_len + 1]


@pytest.mark.parametrize(("sizes", "documents", "seq_len"), SHAPES)
def test_the_count_is_of_samples_that_fit(tmp_path, sizes, documents, seq_len):
    samples = Samples(dataset_of(tmp_path, sizes), documents, seq_len, seed=1)
    for epochs in (1, 2, 3, 7):
        starts = range(0, epochs * samples.tokens, seq_len)
        assert samples.count(epochs) == sum(start + seq_len + 1 <= epochs * samples.tokens for start in starts)


@pytest.mark.parametrize(("sizes", "documents", "seq_len"), SHAPES)
def test_document_ids_change_where_a_document_ends(tmp_path, sizes, documents, seq_len):
    samples = Samples(dataset_of(tmp_path, sizes), documents, seq_len, seed=1)
    once = [number for number in range(*documents) for _ in range(sizes[number])]
    repeated = [(epoch, number) for epoch in range(5) for number in once]
    for sample in range(4 * samples.tokens // seq_len):
        here = repeated[sample * seq_len : sample * seq_len + seq_len]
        found = samples.document_ids(sample)
        assert found.dtype == np.int32
        assert found.tolist() == [sorted(set(here)).index(document) for document in here]


@pytest.mark.parametrize(("sizes", "documents", "seq_len"), SHAPES)
def test_each_epoch_visits_each_of_its_samples_once(tmp_path, sizes, documents, seq_len):
    samples = Samples(dataset_of(tmp_path, sizes), documents, seq_len, seed=7)
    position = 0
    for epoch in range(6):
        start, stop = epoch * samples.tokens, (epoch + 1) * samples.tokens
        expected = [sample for sample in range(stop + 1) if start <= sample * seq_len < stop]
        ids = [samples.id_at(position + place) for place in range(len(expected))]
        assert sorted(ids) == expected
        position += len(expected)


def test_order_depends_on_seed_and_epoch(tmp_path):
    dataset = dataset_of(tmp_path, [401])
    orders = set()
    for seed in (1, 2, 12):
        samples = Samples(dataset, (0, 1), 4, seed)
        for first in (0, 101, 201, 301):  # 401 tokens: epochs of 101, 100, 100 and 100 samples
            orders.add(tuple(samples.id_at(first + place) - first for place in range(100)))
    assert len(orders) == 12


def test_any_position_is_found_without_those_before_it(tmp_path):
    dataset = dataset_of(tmp_path, [401])
    samples = Samples(dataset, (0, 1), 4, 1)
    forwards = [samples.id_at(position) for position in range(500)]
    assert [Samples(dataset, (0, 1), 4, 1).id_at(position) for position in reversed(range(500))] == forwards[::-1]


def test_without_shuffling_position_and_id_are_the_same(tmp_path):
    samples = Samples(dataset_of(tmp_path, [50]), (0, 1), 4, 1, shuffle=False)
    assert [samples.id_at(position) for position in range(40)] == [*range(40)]


def test_an_order_of_before_is_the_order_of_now():
    """A run that is resumed with a newer release goes on in the same order; a change here breaks such runs."""
    assert [permute(index, 10, "1234:0") for index in range(10)] == [5, 2, 7, 8, 0, 9, 1, 3, 6, 4]


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 1024, 1025, 4097])
def test_the_permutation_is_one(size):
    assert sorted(permute(index, size, "key") for index in range(size)) == [*range(size)]


@pytest.mark.parametrize("size", [2**31 + 1, 2**40, 10**15])
def test_the_permutation_of_sizes_that_no_list_holds(size):
    images = {permute(index, size, "key") for index in (*range(1000), *range(size - 1000, size))}
    assert len(images) == 2000
    assert all(0 <= image < size for image in images)
    assert sum(image < size // 2 for image in images) == pytest.approx(1000, abs=5 * np.sqrt(500))


@pytest.mark.parametrize("size", [1000, 4096])
def test_the_permutation_looks_random(size):
    """Each statistic within five standard deviations of its mean over all permutations."""
    order = np.array([permute(index, size, "a key") for index in range(size)])
    correlation = np.corrcoef(np.arange(size), order)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(size)
    ascents = int((np.diff(order) > 0).sum())  # Eulerian numbers: mean (n-1)/2, variance (n+1)/12
    assert abs(ascents - (size - 1) / 2) < 5 * np.sqrt((size + 1) / 12)
    assert int((order == np.arange(size)).sum()) <= 8  # fixed points: Poisson of mean 1
    assert int((np.abs(np.diff(order)) == 1).sum()) <= 12  # neighbours that stay neighbours: Poisson of mean 2


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_permutations_are_all_drawn(size):
    keys = 2400
    drawn = Counter(tuple(permute(index, size, f"{key}") for index in range(size)) for key in range(keys))
    every = [*permutations(range(size))]
    assert set(drawn) == set(every)
    expected = keys / len(every)
    assert all(expected / 2 < count < expected * 2 for count in drawn.values())


def test_where_an_index_goes_is_even():
    """Over keys an index goes to each place equally often: chi-squared, 12 degrees of freedom, its 1e-6 tail at 52."""
    drawn = Counter(permute(5, 13, f"{key}") for key in range(6500))
    assert sum((drawn[place] - 500) ** 2 / 500 for place in range(13)) < 52


@pytest.mark.parametrize("documents", [0, 1, 2, 10, 33, 1000, 10_000_019])
@pytest.mark.parametrize("proportions", [[969, 30, 1], [1, 0, 0], [0, 0, 2.5], [0.7, 0.2, 0.1], [1, 1, 1]])
def test_a_split_covers_all_documents_in_proportion(documents, proportions):
    ranges = split_documents(documents, proportions)
    assert [start for start, _ in ranges] + [documents] == [0] + [stop for _, stop in ranges]
    for (start, stop), proportion in zip(ranges, proportions, strict=True):
        assert abs(stop - start - documents * proportion / sum(proportions)) <= 1
        assert proportion or start == stop


def test_the_usual_split():
    assert split_documents(1000, [969, 30, 1]) == [(0, 969), (969, 999), (999, 1000)]


def test_a_split_into_nothing_is_refused():
    with pytest.raises(UserError, match=r"data\.split: \[0, 0, 0\]"):
        split_documents(10, [0, 0, 0])


def test_synthetic_samples_depend_on_seed_and_id_alone():
    samples, again, other = (SyntheticSamples(1000, 64, seed) for seed in (1, 1, 2))
    rows = {samples.tokens_of(sample).tobytes() for sample in range(50)}
    assert len(rows) == 50
    assert again.tokens_of(49).tobytes() in rows
    assert other.tokens_of(49).tobytes() not in rows
    tokens = np.concatenate([samples.tokens_of(sample) for sample in range(100)])
    assert (tokens.dtype, tokens.min(), tokens.max()) == (np.int64, 0, 999)
    assert len(samples.tokens_of(0)) == 65
    assert samples.document_ids(0).tolist() == [0] * 64
