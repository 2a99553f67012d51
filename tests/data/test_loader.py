"""Which samples each rank trains on at each step, and that reading ahead is neither seen nor left behind."""

import threading
import time
from itertools import chain

import numpy as np
import pytest

from polarlm.config import DataConfig, UserError
from polarlm.data import IndexedDataset, IndexedWriter, Loader, Samples, SyntheticSamples, batch_of, open_split
from polarlm.data.loader import tokenizer_of


class Numbered:
    """Samples that are their own id, and remember that they were read."""

    seq_len = 3

    def __init__(self):
        self.read = []

    def id_at(self, position):
        return position

    def source_of(self, sample):
        return sample % 2

    def tokens_of(self, sample):
        self.read.append(sample)
        return np.full(4, sample)


def write(prefix, sizes, dtype=np.int32):
    """Documents of these sizes; the ids of the stream count from 0."""
    with IndexedWriter(prefix, dtype) as writer:
        for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
            writer.add_document(np.arange(stop - size, stop))
    return IndexedDataset(prefix)


@pytest.fixture
def ten(tmp_path):
    """Ten samples an epoch, in a shuffled order."""
    samples = Samples(write(tmp_path / "ten", [13, 7, 20]), (0, 3), seq_len=4, seed=3)
    assert [samples.id_at(position) // 10 for position in (0, 9, 10, 19, 20, 29)] == [0, 0, 1, 1, 2, 2]
    return samples


def steps_of(samples, count, *, batch=2, micro=1, rank=0, ranks=1, start=0, prefetch=2):
    """The first inputs of the samples of each step, [step][sample]: they tell the samples of one epoch apart."""
    sizes = {"global_batch_size": batch, "micro_batch_size": micro, "prefetch": prefetch}
    with Loader(samples, **sizes, rank=rank, ranks=ranks, start_sample=start) as loader:
        return [
            [int(row[0]) for micro in step for row in micro.tokens]
            for step, _ in zip(loader, range(count), strict=False)
        ]


def test_a_batch_says_which_dataset_each_sample_is_of():
    assert batch_of(Numbered(), [4, 7, 5]).sources.tolist() == [0, 1, 1]


@pytest.mark.parametrize("done", range(1, 15))
def test_a_resumed_run_reads_what_a_straight_one_does(ten, done):
    """Three epochs of ten samples in batches of two, stopped after each step; at epochs' ends too."""
    straight = steps_of(ten, 15)
    assert straight[:done] + steps_of(ten, 15 - done, start=2 * done) == straight
    for epoch in range(3):
        assert sorted(chain(*straight[5 * epoch : 5 * epoch + 5])) == [4 * sample for sample in range(10)]
    assert straight[:5] != straight[5:10] != straight[10:]


def test_a_run_resumed_twice_on_other_ranks_reads_what_a_straight_one_does(ten):
    """B32."""
    straight = steps_of(ten, 15, batch=4)
    consumed, stitched = 0, []
    for ranks, steps in ((2, 5), (1, 3), (4, 2), (2, 5)):
        shares = [steps_of(ten, steps, batch=4, rank=rank, ranks=ranks, start=consumed) for rank in range(ranks)]
        stitched += [[*chain(*step)] for step in zip(*shares, strict=True)]
        consumed += 4 * steps
    assert stitched == straight


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
def test_reading_ahead_changes_nothing(ten, prefetch):
    """B32: what is read ahead does not count as used."""
    assert steps_of(ten, 15, prefetch=prefetch) == steps_of(ten, 15)


def test_each_rank_takes_its_part_of_the_global_batch():
    def shares(ranks, micro):
        return [steps_of(Numbered(), 3, batch=8, micro=micro, rank=r, ranks=ranks, start=16) for r in range(ranks)]

    assert shares(1, 8) == [[[16, 17, 18, 19, 20, 21, 22, 23], [*range(24, 32)], [*range(32, 40)]]]
    assert shares(2, 2) == [
        [[16, 17, 18, 19], [24, 25, 26, 27], [32, 33, 34, 35]],
        [[20, 21, 22, 23], [28, 29, 30, 31], [36, 37, 38, 39]],
    ]
    assert shares(4, 1) == [
        [[16, 17], [24, 25], [32, 33]],
        [[18, 19], [26, 27], [34, 35]],
        [[20, 21], [28, 29], [36, 37]],
        [[22, 23], [30, 31], [38, 39]],
    ]


def test_a_share_comes_in_microbatches():
    sizes = {"global_batch_size": 12, "micro_batch_size": 3}
    with Loader(Numbered(), **sizes, rank=1, ranks=2, start_sample=0) as loader:
        assert [batch.tokens[:, 0].tolist() for batch in next(loader)] == [[6, 7, 8], [9, 10, 11]]


def loaders_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_steps_are_read_ahead_and_no_further():
    samples = Numbered()
    sizes = {"global_batch_size": 2, "micro_batch_size": 2}
    with Loader(samples, **sizes, rank=0, ranks=1, start_sample=0, prefetch=3) as loader:
        next(loader)
        deadline = time.monotonic() + 5
        while len(samples.read) < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert samples.read == [*range(8)]  # the step that was taken and three more
        assert len(loaders_alive()) == 1
    assert loaders_alive() == []


def test_an_error_comes_where_its_step_was_due_and_the_thread_ends():
    class Broken(Numbered):
        def tokens_of(self, sample):
            if sample == 2:
                raise OSError("the disk is gone")
            return super().tokens_of(sample)

    sizes = {"global_batch_size": 1, "micro_batch_size": 1}
    with Loader(Broken(), **sizes, rank=0, ranks=1, start_sample=0, prefetch=5) as loader:
        assert [int(next(loader)[0].tokens[0, 0]) for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    assert loaders_alive() == []


def test_a_batch_holds_inputs_their_next_tokens_and_places(ten):
    batch = batch_of(ten, [0, 9])
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [36, 37, 38, 39]]
    assert batch.targets.tolist() == [[1, 2, 3, 4], [37, 38, 39, 0]]  # the split begins anew
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.document_ids is None
    assert {array.dtype for array in (batch.tokens, batch.targets, batch.positions)} == {np.dtype(np.int64)}


def test_masked_documents_begin_at_position_zero(tmp_path):
    samples = Samples(write(tmp_path / "data", [5, 1, 2, 6]), (0, 4), seq_len=6, seed=1)
    batch = batch_of(samples, [0, 1, 2], mask_documents=True)
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3]]
    assert batch.targets.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 0, 1, 2, 3, 4]]


def data_of(prefix, split=(8, 1, 1)):
    return DataConfig(paths=[str(prefix)], split=[*split])


def test_parts_of_a_run_share_no_token(tmp_path):
    write(tmp_path / "data", [10] * 10)
    parts = {which: open_split(data_of(tmp_path / "data"), 3, 1, which) for which in ("train", "validation", "test")}
    seen = {which: {int(t) for i in range(one.count()) for t in one.tokens_of(i)} for which, one in parts.items()}
    assert seen["train"] == {*range(79)}  # the 80th begins a sample that does not fit
    assert seen["validation"] == {*range(80, 90)}
    assert seen["test"] == {*range(90, 100)}
    order = {which: [one.id_at(position) for position in range(one.count())] for which, one in parts.items()}
    assert order["validation"] == order["test"] == [0, 1, 2]
    assert order["train"] != sorted(order["train"])


def test_a_part_without_a_sample_names_the_split(tmp_path):
    write(tmp_path / "data", [10] * 10)
    with pytest.raises(UserError) as caught:
        open_split(data_of(tmp_path / "data"), 10, 1, "validation")
    message = str(caught.value)
    assert message.startswith("data.split: [8.0, 1.0, 1.0] leaves validation 1 of the 10 documents")
    assert "10 tokens, and one sample takes train.seq_len + 1 = 11" in message
    assert open_split(data_of(tmp_path / "data"), 9, 1, "validation").count() == 1
    with pytest.raises(UserError, match=r"^data\.split: .* leaves test 0 of the 10 documents"):
        open_split(data_of(tmp_path / "data", (1, 1, 0)), 3, 1, "test")


def test_a_missing_dataset_names_the_paths(tmp_path):
    with pytest.raises(UserError, match=r"^data\.paths: .*`polarlm data prepare`"):
        open_split(data_of(tmp_path / "nothing"), 3, 1)


def test_data_with_more_ids_than_the_model_is_refused(tmp_path):
    write(tmp_path / "data", [100])
    (tmp_path / "data.json").write_text('{"tokenizer": {"vocab_size": 257, "path": "tok", "digest": "d"}}')
    data = data_of(tmp_path / "data", (1, 0, 0))
    with pytest.raises(UserError, match=r"^model\.vocab_size: 256 is less than the 257 ids"):
        open_split(data, 3, 1, vocab_size=256)
    assert open_split(data, 3, 1, vocab_size=257).tokens == 100
    assert tokenizer_of(data) == "tok"


def test_data_that_does_not_say_its_tokenizer(tmp_path):
    write(tmp_path / "data", [100])
    with pytest.raises(UserError, match=r"^data\.tokenizer"):
        tokenizer_of(data_of(tmp_path / "data"))
    assert tokenizer_of(DataConfig(paths=["synthetic"])) == "bytes"


def test_synthetic_data_needs_no_files_and_validates_on_other_samples():
    train, validation = (
        open_split(DataConfig(paths=["synthetic"]), 8, 1, which, 100) for which in ("train", "validation")
    )
    assert isinstance(train, SyntheticSamples)
    assert train.tokens_of(0).tolist() != validation.tokens_of(0).tolist()
    assert max(int(train.tokens_of(i).max()) for i in range(100)) == 99
