"""Documents as samples: each token once an epoch, alone and padded; grouped by length, the same ones with less
padding."""

from itertools import chain

import numpy as np
import pytest

from polarlm.config import UserError, load_run
from polarlm.data import IndexedWriter, Loader, StepShapes, batch_of, open_split
from polarlm.model import IGNORED

SEQ, BATCH = 8, 4
FLAGS = (
    f"--model.layers 1 --model.hidden 16 --model.heads 2 --model.vocab-size 5000 --train.seq-len {SEQ} "
    f"--train.global-batch-size {BATCH} --data.split 1 0 0 --data.samples documents"
)
SIZES = [1, 2, 3, SEQ, SEQ + 1, SEQ + 2, 2 * SEQ + 1, 3 * SEQ, 1, 5]


@pytest.fixture
def config_of(tmp_path):
    def config_of(sizes, *flags):
        """Documents of these sizes; the ids of a stream count from 0, and so tell where they are from."""
        names = []
        for number, one in enumerate(sizes if isinstance(sizes[0], list) else [sizes]):
            names.append(str(tmp_path / f"data{number}"))
            with IndexedWriter(names[-1], np.int32) as writer:
                for stop, size in zip(np.cumsum(one), one, strict=True):
                    writer.add_document(np.arange(stop - size, stop) + 2000 * number)
        length = [] if "--train.tokens" in flags else ["--train.steps", "5"]
        words = [*FLAGS.split(), "--data.paths", *names, *length, *flags]
        return load_run(None, environment={}, flags=words).config

    return config_of


def _open(config):
    group = config.train.global_batch_size if config.data.group_by_length else None
    return open_split(config.data, SEQ, config.seed, "train", 5000, group)


def _pairs(sizes):
    """Every (input, target) that a document trains, place by place."""
    starts = np.cumsum([0, *sizes])
    return [(place, place + 1) for start, size in zip(starts, sizes, strict=False) for place in
            range(start, start + size - 1)]  # fmt: skip


def _trained(batch):
    is_trained = batch.targets != IGNORED
    return [*zip(batch.tokens[is_trained].tolist(), batch.targets[is_trained].tolist(), strict=True)]


def test_each_piece_of_a_document_is_padded_and_nothing_crosses_its_end(config_of):
    samples = _open(config_of(SIZES))
    assert [samples.length_of(sample) for sample in range(samples.count())] == [1, 2, 7, 8, 8, 1, 8, 8, 8, 8, 7, 4]
    batch = batch_of(samples, [0, 5, 11], seq_len=4)
    assert batch.tokens.tolist() == [[1, 0, 0, 0], [31, 0, 0, 0], [75, 76, 77, 78]]
    assert batch.targets.tolist() == [[2] + 3 * [IGNORED], [32] + 3 * [IGNORED], [76, 77, 78, 79]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.document_ids is None


@pytest.mark.parametrize("grouped", ["true", "false"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_token_of_every_document_is_trained_once_an_epoch(config_of, grouped, ranks):
    """Ends of epochs lie within global batches; a resumed run reads what a straight one does."""
    sizes = np.random.default_rng(1).integers(1, 25, size=150).tolist()
    config = config_of(sizes, "--data.group-by-length", grouped)
    samples = _open(config)
    epoch, shapes = samples.count(), StepShapes(config, samples)
    assert epoch % BATCH
    steps, done = -(-3 * epoch // BATCH), 37

    def read(rank, start):
        options = {"global_batch_size": BATCH, "micro_batch_size": 1, "shapes": shapes, "rank": rank, "ranks": ranks}
        with Loader(samples, **options, start_sample=start * BATCH) as loader:
            return [step for step, _ in zip(loader, range(steps - start), strict=False)]

    shares = [read(rank, 0) for rank in range(ranks)]
    batches = [[batch for share in shares for batch in share[step]] for step in range(steps)]
    for number in range(3):
        rows = [*chain(*batches)][number * epoch : (number + 1) * epoch]
        assert sorted(chain(*map(_trained, rows))) == _pairs(sizes), number
    for step, batch in enumerate(batches):
        shape, longest = shapes.at(step * BATCH), max(len(_trained(row)) for row in batch)
        assert {row.tokens.shape for row in batch} == {(1, longest)}
        assert (shape.seq_len, shape.tokens) == (longest, sum(len(_trained(row)) for row in batch))
        assert shape.positions == BATCH * longest
    resumed = read(ranks - 1, done)
    assert [[row.tokens.tolist() for row in step] for step in resumed] == [
        [row.tokens.tolist() for row in step] for step in shares[-1][done:]
    ]


def test_grouping_pads_little_and_mixes_what_goes_together(config_of):
    sizes = np.random.default_rng(2).integers(2, SEQ + 2, size=2000).tolist()
    padding, partners = {}, {}
    for grouped in ("false", "true"):
        config = config_of(sizes, "--data.group-by-length", grouped)
        samples = _open(config)
        shapes = [StepShapes(config, samples).at(step * BATCH) for step in range(400)]
        padding[grouped] = 1 - sum(shape.tokens for shape in shapes) / sum(shape.positions for shape in shapes)
        ids = [[samples.id_at(place) % 2000 for place in range(BATCH * step, BATCH * step + BATCH)]
               for step in range(1000)]  # fmt: skip
        partners[grouped] = [{frozenset(batch) for batch in ids[epoch : epoch + 500]} for epoch in (0, 500)]
    assert padding["false"] > 0.25
    assert padding["true"] < 0.03
    assert not set.intersection(*partners["true"])  # another epoch brings others together
    lengths = [shape.seq_len for shape in shapes[:64]]
    assert lengths != sorted(lengths)


def test_datasets_of_a_blend_are_grouped_together_and_each_gives_every_document_once_an_epoch(config_of):
    sizes = [np.random.default_rng(seed).integers(2, 20, size=count).tolist() for seed, count in ((1, 90), (2, 45))]
    plain, samples = (_open(config_of(sizes, "--data.group-by-length", grouped)) for grouped in ("false", "true"))
    period = plain.count()
    assert sorted(map(samples.id_at, range(period))) == sorted(map(plain.id_at, range(period)))
    assert [samples.id_at(place) for place in range(period)] != [plain.id_at(place) for place in range(period)]
    together = batch_of(samples, [samples.id_at(place) for place in range(period)], seq_len=SEQ)
    expected = sorted([*_pairs(sizes[0]), *((one + 2000, other + 2000) for one, other in _pairs(sizes[1]))])
    assert abs(len(_trained(together)) - len(expected)) <= SEQ  # datasets are in proportion within one sample
    assert len({*_trained(together)}) == len(_trained(together))


def test_lengths_are_what_ranks_can_share_out(config_of):
    config = config_of([4, 6, 3, 2], "--parallel.ranks", "2", "--parallel.context", "2")
    shape = StepShapes(config, _open(config)).at(0)
    assert (shape.seq_len, shape.tokens, shape.positions) == (8, 3 + 5 + 2 + 1, 32)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.paths", "synthetic"], r"data\.samples: synthetic data has no documents"),
        (["--data.mask-documents", "true"], r"data\.mask_documents: where data\.samples is documents"),
        (["--data.samples", "stream", "--data.group-by-length", "true"], r"data\.group_by_length: samples of a stream"),
        (["--train.tokens", "1000"], r"train\.tokens: where data\.samples is documents"),
        (["--train.schedule.warmup-tokens", "64"], r"train\.schedule\.warmup_tokens: where"),
        (["--train.seq-len-schedule", "[{until_step: 1, seq_len: 4}]"], r"train\.seq_len_schedule: where"),
    ],
)
def test_what_does_not_go_with_documents_is_refused_by_name(config_of, flags, said):
    with pytest.raises(UserError, match=f"^--.*: {said}"):
        config_of([5, 5], *flags)


def test_documents_of_one_token_are_no_samples(config_of):
    with pytest.raises(UserError, match=r"^data\.split: .* leaves train 3 of the 3 documents .* a document of two"):
        _open(config_of([1, 1, 1]))
