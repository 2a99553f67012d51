"""Samples cut into shorter sequences for the first steps: the same tokens in the same order, each trained on once."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from polarlm.config import UserError, check_same_run, load_run
from polarlm.data import IndexedWriter, Loader, StepShapes, batch_of, open_split
from polarlm.model import Transformer, initialise
from polarlm.parallel import Device, Engine, World
from polarlm.train.speed import Speedometer
from polarlm.train.step import as_tensors
from train.trained import train_in

ALONE = World(0, 1, Device(torch.device("cpu")))
SEQ, BATCH, STEPS = 16, 4, 6
SCHEDULE = "[{until_step: 2, seq_len: 4}, {until_step: 4, seq_len: 8}]"
LENGTHS = [4, 4, 8, 8, 16, 16]
SHAPE = (
    f"--model.layers 2 --model.hidden 16 --model.heads 2 --model.vocab-size 257 --train.seq-len {SEQ} "
    f"--train.global-batch-size {BATCH} --train.micro-batch-size 1 --train.steps {STEPS} "
    "--train.optimizer.lr 1e-2 --data.tokenizer bytes --data.split 1 1 0 --checkpoint.in-background false"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of up to 20 random tokens."""
    path, random = tmp_path_factory.mktemp("data") / "data", np.random.default_rng(1)
    with IndexedWriter(path, np.uint16) as writer:
        for size in random.integers(1, 21, size=200):
            writer.add_document(random.integers(257, size=size))
    return path


@pytest.fixture
def config_of(data):
    def config_of(*flags, schedule=SCHEDULE):
        words = [*SHAPE.split(), "--data.paths", str(data), "--train.seq-len-schedule", schedule, *flags]
        return load_run(None, environment={}, flags=words).config

    return config_of


def _batches(config, rank=0, ranks=1, start_step=0):
    """Each step's microbatches from there on."""
    samples = open_split(config.data, SEQ, config.seed)
    sizes = {"global_batch_size": BATCH, "micro_batch_size": 1, "mask_documents": config.data.mask_documents}
    shapes = StepShapes(config, samples)
    with Loader(samples, **sizes, rank=rank, ranks=ranks, start_sample=start_step * BATCH, shapes=shapes) as loader:
        return [step for step, _ in zip(loader, range(STEPS - start_step), strict=False)]


def _flat(steps, field):
    return [np.concatenate([getattr(batch, field).ravel() for batch in step]) for step in steps]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_step_has_the_tokens_of_an_uncut_run_in_their_order(config_of, ranks):
    whole = _batches(config_of(schedule="[]"))
    shares = [_batches(config_of(), rank, ranks) for rank in range(ranks)]
    cut = [[batch for rank in range(ranks) for batch in shares[rank][step]] for step in range(STEPS)]
    assert [step[0].tokens.shape for step in cut] == [(SEQ // length, length) for length in LENGTHS]
    for field in ("tokens", "targets"):
        np.testing.assert_array_equal(_flat(cut, field), _flat(whole, field))
    for step, resumed in enumerate(_batches(config_of(), start_step=3), start=3):
        np.testing.assert_array_equal(_flat([resumed], "positions"), _flat([cut[step]], "positions"))
        assert [batch.tokens.shape for batch in resumed] == [batch.tokens.shape for batch in cut[step]]


@pytest.mark.parametrize("mask", ["true", "false"])
def test_a_cut_step_gives_the_gradients_of_short_sequences_taken_alone(config_of, mask):
    """Each sequence, or each document's part in it, goes through a plain model by itself, from position 0 on."""
    config = config_of("--data.mask-documents", mask, "--train.micro-batch-size", "2")
    samples = open_split(config.data, SEQ, config.seed)
    batches = [batch_of(samples, ids, config.data.mask_documents, 4) for ids in ([3, 0], [7, 5])]
    engine = Engine(config, ALONE)
    loss = engine.forward_backward([as_tensors(batch) for batch in batches], BATCH * SEQ)

    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    total, pieces = 0.0, 0
    for sample in (3, 0, 7, 5):
        ids, documents = torch.from_numpy(samples.tokens_of(sample)), samples.document_ids(sample)
        borders = {*range(0, SEQ, 4), *(np.flatnonzero(np.diff(documents)) + 1 if mask == "true" else ())}
        for start, stop in zip(sorted(borders), [*sorted(borders)[1:], SEQ], strict=True):
            logits = model(ids[None, start:stop], torch.arange(stop - start)[None])
            total = total + F.cross_entropy(logits[0], ids[start + 1 : stop + 1], reduction="sum")
            pieces += 1
    (total / (BATCH * SEQ)).backward()
    assert pieces == 16 if mask == "false" else pieces > 16
    assert loss == pytest.approx(total.item(), rel=1e-6)
    for (name, parameter), own in zip(model.named_parameters(), engine.model.parameters(), strict=True):
        norm = parameter.grad.norm()
        assert (own.grad - parameter.grad).norm() <= 1e-5 * norm + 1e-8, name


def _kept(lines):
    kept = ("step", "samples", "tokens", "seq_len", "loss", "grad_norm", "val_loss")
    return [{key: line[key] for key in kept if key in line} for line in lines]


def _nearly(lines):
    return [{key: pytest.approx(value, rel=1e-5) for key, value in line.items()} for line in _kept(lines)]


LAYOUTS = {  # a layout of two ranks, and what is trained on it
    "zero 2": ("--parallel.zero-stage 2", ""),
    "pipeline": ("--parallel.pipeline 2 --parallel.pipeline-schedule zbvzerobubble", "--model.layers 4"),
    "ring": ("--parallel.context 2", "--data.mask-documents true"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_steps_of_one_across_the_switches(tmp_path, config_of, layout):
    parallel, shared = LAYOUTS[layout]
    flags = ["--train.eval-every", "3", "--train.eval-samples", "5", *shared.split()]
    alone = train_in(tmp_path / "alone", config_of(*flags))
    both = train_in(tmp_path / "both", config_of(*flags, "--parallel.ranks", "2", *parallel.split()))
    assert [line["seq_len"] for line in both] == LENGTHS
    assert [line["tokens"] for line in both] == [BATCH * SEQ * step for step in range(1, STEPS + 1)]
    assert _kept(both) == _nearly(alone)


def test_a_run_resumed_before_a_switch_goes_on_to_the_bit_and_may_be_cut_otherwise(tmp_path, config_of):
    flags = ["--train.eval-every", "3", "--checkpoint.every", "1", "--checkpoint.keep-last", "9"]
    straight = train_in(tmp_path / "straight", config_of(*flags))
    for done in (1, 3):  # the next step is at the old length, and at the new
        folder = tmp_path / f"after {done}"
        shutil.copytree(tmp_path / f"straight/checkpoints/step-{done}", folder / f"checkpoints/step-{done}")
        assert _kept(train_in(folder, config_of(*flags))) == _kept(straight[done:])
    uncut = config_of(*flags, schedule="[]")
    check_same_run(config_of(*flags), uncut)
    folder = tmp_path / "uncut"
    shutil.copytree(tmp_path / "straight/checkpoints/step-1", folder / "checkpoints/step-1")
    rest = train_in(folder, uncut)
    assert [line["samples"] for line in rest] == [line["samples"] for line in straight[1:]]
    assert all("seq_len" not in line for line in rest)
    assert rest[0]["loss"] != straight[1]["loss"]


def test_flops_are_those_of_the_steps_own_length(config_of):
    config, device = config_of(), Device(torch.device("cpu"))
    shapes = StepShapes(config, open_split(config.data, SEQ, config.seed))
    for step, length in enumerate(LENGTHS):
        own = config.model_copy(
            update={
                "train": config.train.model_copy(
                    update={"seq_len": length, "global_batch_size": BATCH * SEQ // length, "seq_len_schedule": []}
                )
            }
        )
        rates = Speedometer(config, device).measure(0.5, shapes.at(step * BATCH))
        expected = Speedometer(own, device).measure(0.5)
        assert rates.pop("samples_per_sec") == BATCH / 0.5
        expected.pop("samples_per_sec")
        assert rates == expected


@pytest.mark.parametrize(
    ("flags", "schedule", "said"),
    [
        ("", "[{until_step: 2, seq_len: 6}]", r"6 until step 2 does not divide train.seq_len 16 .* nearest allowed: 4"),
        ("--parallel.ranks 2 --parallel.context 2", "[{until_step: 2, seq_len: 2}]",
         r"2 until step 2 .* a multiple of 4 .* nearest allowed: 4"),
        ("", "[{until_step: 3, seq_len: 4}, {until_step: 2, seq_len: 8}]", r"until_step \[3, 2\] should grow"),
        ("", "[{until_step: 2}]", r"seq_len: is missing"),
        ("", "[4]", r": 4: should be"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused_by_name(config_of, flags, schedule, said):
    with pytest.raises(UserError, match=rf"^--train.seq-len-schedule: train.seq_len_schedule.*{said}"):
        config_of(*flags.split(), schedule=schedule)
