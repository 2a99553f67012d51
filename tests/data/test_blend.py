"""Blends: how many samples each dataset gives, in what order, and what is said of a bad list."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.config import DataConfig, UserError
from polarlm.data import BlendedSamples, IndexedWriter, open_split, read_paths
from polarlm.data.blend import whole_parts


class _Counted:
    seq_len = 1

    def __init__(self, available=10**12):
        self.available = available

    def count(self, epochs=1):
        return self.available * epochs

    def spread(self, count):
        return list(range(count))

    def id_at(self, position):
        return position


def _blend(*weights, available=10**12):
    return BlendedSamples([_Counted(available) for _ in weights], [Fraction(str(weight)) for weight in weights])


def _counts(blend, samples, datasets):
    return tuple(np.bincount([blend.place(position)[0] for position in range(samples)], minlength=datasets))


@pytest.mark.parametrize(
    ("weights", "samples", "counts"),
    [
        ((0.001, 0.999), 1000, (1, 999)),
        ((0.001, 0.999), 1001, (2, 999)),
        ((0.5, 0.3, 0.2), 10, (5, 3, 2)),
        ((1, 1, 1), 10, (4, 3, 3)),
    ],
)
def test_known_counts(weights, samples, counts):
    assert _counts(_blend(*weights), samples, len(weights)) == counts


def test_weights_count_by_their_proportion():
    order = [_blend(1, 999).place(position) for position in range(3000)]
    assert order == [_blend(0.001, 0.999).place(position) for position in range(3000)]


def _errors(weights, samples):
    """How far each dataset is ahead of its share after 1, 2, ... samples, exactly."""
    exact = [Fraction(str(weight)) for weight in weights]
    exact = [weight / sum(exact) for weight in exact]
    blend, counts = _blend(*weights), [0] * len(weights)
    for position in range(samples):
        dataset, index = blend.place(position)
        assert index == counts[dataset]
        counts[dataset] += 1
        yield [count - weight * (position + 1) for count, weight in zip(counts, exact, strict=True)]


@pytest.mark.parametrize(
    "weights", [(0.3, 0.7), (0.5, 0.3, 0.2), (1, 2, 3, 4), (0.05, 0.05, 0.9), (1, 1, 18, 20, 7), (1, 1, 1, 1, 1, 95)]
)
def test_counts_stay_within_one_of_their_share_at_every_point(weights):
    assert max(abs(error) for errors in _errors(weights, 400) for error in errors) <= 1


@given(st.lists(st.integers(1, 60), min_size=2, max_size=9))
@settings(max_examples=60, deadline=None)
def test_counts_stay_within_one_for_any_weights(weights):
    assert max(abs(error) for errors in _errors(weights, 2 * sum(weights)) for error in errors) <= 1


def test_a_list_of_a_thousand_datasets_is_laid_out_in_seconds():
    """Corpora are handed out in many files, with weights such as 0.0018520780893211373."""
    shares = np.random.default_rng(1).dirichlet(np.ones(1000)) + 1e-4
    start = time.process_time()
    counts = _counts(_blend(*shares), 100_000, 1000)
    assert time.process_time() - start < 8
    assert np.abs(counts - shares / shares.sum() * 100_000).max() < 2  # one by the order, the rest by rounding


def test_five_digits_are_kept_to_the_last():
    blend = _blend("0.00001", "0.33333", "0.66666")
    far = 10**9
    counts = [0, 0, 0]
    for position in range(far, far + 300_000):
        counts[blend.place(position)[0]] += 1
    assert counts == [3, 99_999, 199_998]


def test_a_position_far_on_is_found_at_once_and_counts_on():
    blend = _blend(0.3, 0.7)
    far = 10**12
    assert [blend.place(far + step)[0] for step in range(10)].count(0) == 3
    dataset, index = blend.place(far)
    assert abs(index - (0.3, 0.7)[dataset] * far) <= 1


def test_weights_too_fine_are_rounded():
    quotas = whole_parts([Fraction(1), Fraction(123_456_789)])
    assert sum(quotas) <= 100_001
    assert quotas[0] == 1


def test_count_is_where_the_first_dataset_begins_again():
    blend = BlendedSamples([_Counted(10), _Counted(100)], [Fraction(1, 2), Fraction(1, 2)])
    assert blend.count() == 20
    taken = [blend.place(position) for position in range(blend.count())]
    assert max(index for dataset, index in taken if dataset == 0) == 9


@pytest.fixture
def two(tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(50):
                writer.add_document(np.full(20, value))
    return tmp_path


def test_samples_of_a_blend_are_its_datasets(two):
    data = DataConfig(paths=[f"0.25 {two}/a", f"0.75 {two}/b"], split=[8, 1, 1])
    samples = open_split(data, 4, 1, "train")
    values = [int(samples.tokens_of(samples.id_at(position))[0]) for position in range(400)]
    assert (values.count(1), values.count(2)) == (100, 300)
    assert all(values[p] == 1 + samples.source_of(samples.id_at(p)) for p in range(400))
    without_weights = open_split(DataConfig(paths=[f"{two}/a", f"{two}/b"], split=[8, 1, 1]), 4, 1, "train")
    values = [int(without_weights.tokens_of(without_weights.id_at(p))[0]) for p in range(100)]
    assert values.count(1) == 50


def test_several_epochs_of_the_small_one_visit_each_sample_equally(two):
    samples = open_split(DataConfig(paths=[f"1 {two}/a", f"1 {two}/b"], split=[8, 1, 1]), 4, 1, "train")
    per_epoch = 40 * 20 // 4
    ids = [samples.id_at(position) // 2 % per_epoch for position in range(6 * per_epoch)]
    assert set(np.bincount(ids)) == {6}


def test_spread_keeps_the_proportions(two):
    samples = open_split(DataConfig(paths=[f"1 {two}/a", f"3 {two}/b"], split=[0, 1, 0]), 4, 1, "validation")
    sources = [samples.source_of(one) for one in samples.spread(40)]
    assert (sources.count(0), sources.count(1)) == (10, 30)
    assert len(set(samples.spread(40))) == 40


def test_a_file_list(two, tmp_path):
    listed = tmp_path / "list.txt"
    listed.write_text(f"# weight prefix corpus\n\n0.25 {two}/a wiki\n  0.75 {two}/b code\n")
    paths = read_paths(DataConfig(file_list=str(listed)))
    assert [(path.weight, path.prefix) for path in paths] == [
        (Fraction(1, 4), f"{two}/a"),
        (Fraction(3, 4), f"{two}/b"),
    ]


@pytest.mark.parametrize("bad", ["0.5", "half a wiki", "0.5 a wiki more"])
def test_a_bad_line_is_quoted_with_its_number(tmp_path, bad):
    listed = tmp_path / "list.txt"
    listed.write_text(f"0.5 a wiki\n\n{bad}\n")
    with pytest.raises(UserError, match=f"list.txt:3: '{bad}'"):
        read_paths(DataConfig(file_list=str(listed)))


@pytest.mark.parametrize("paths", [["0.5 a", "b"], ["0 a", "1 b"]])
def test_weights_for_all_or_none_and_above_zero(paths):
    with pytest.raises(UserError, match=r"data\.paths"):
        read_paths(DataConfig(paths=paths))
