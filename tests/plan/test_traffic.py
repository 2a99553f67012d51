"""The textbook's amounts, on numbers that can be followed by hand. Against real ranks: tests/verify/test_traffic.py."""

import pytest

from polarlm.config import RunConfig, load_run
from polarlm.plan import count_parameters, step_traffic

LAYERS, HIDDEN, HEADS, DEPTH, SEQ, MICRO, MICROBATCHES = 2, 32, 4, 8, 16, 2, 3
FLAGS = (
    f"--model.family llama --model.layers {LAYERS} --model.hidden {HIDDEN} --model.heads {HEADS} "
    f"--model.vocab-size 64 --train.steps 1 --train.seq-len {SEQ} --train.micro-batch-size {MICRO} "
    f"--train.gradient-accumulation-steps {MICROBATCHES}"
)
P = 4 * count_parameters(load_run(None, environment={}, flags=FLAGS.split()).config.model)
UNITS = LAYERS + 2  # each block, the embedding, and norm and head


def _traffic(layers=LAYERS, kv_heads=HEADS, **parallel):
    """Calls and bytes a rank, by (axis, kind)."""
    model = f"--model.layers {layers} --model.kv-heads {kv_heads}"
    config = load_run(None, environment={}, flags=[*FLAGS.split(), *model.split()]).config
    fields = config.model_dump() | {"parallel": {"ranks": 4, **parallel}}
    traffic = step_traffic(RunConfig.model_validate(fields))
    ranks = fields["parallel"]["ranks"]
    return {key: (calls / ranks, traffic.bytes[key] / ranks) for key, calls in traffic.calls.items()}


def test_one_rank_sends_nothing():
    assert _traffic(ranks=1) == {}


def test_replicas_all_reduce_their_gradients_once_a_step():
    calls = LAYERS + 3  # each block, the embedding, the norm, and the head
    sums = 3 * 2 * 8 * 3 / 4
    assert _traffic()["world", "all_reduce"] == (calls + 3, 2 * P * 3 / 4 + sums)


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters"), [(1, 1, 1), (2, 1, MICROBATCHES), (3, 2 * MICROBATCHES, MICROBATCHES)]
)
def test_zero_gathers_parameters_and_scatters_gradients(stage, gathers, scatters):
    traffic = _traffic(zero_stage=stage)
    assert traffic["world", "all_gather"] == (gathers * UNITS, gathers * P * 3 / 4)
    assert traffic["world", "reduce_scatter"] == (scatters * UNITS, scatters * P * 3 / 4)


def test_groups_reduce_what_is_left_of_the_gradients_over_each_other_once_a_step():
    traffic = _traffic(zero_stage=2, hybrid=2)
    assert traffic["shard", "reduce_scatter"] == (MICROBATCHES * UNITS, MICROBATCHES * P / 2)
    assert traffic["replicate", "all_reduce"] == (UNITS, P / 2)


def test_tensor_with_sequence_parallel_gathers_and_scatters_four_times_a_block():
    calls = (4 * LAYERS + 2) * MICROBATCHES
    size = 4 * MICRO * SEQ * HIDDEN * 3 / 4
    traffic = _traffic(tensor=4)
    assert traffic["world", "all_gather"] == traffic["world", "reduce_scatter"] == (calls, calls * size)


def test_ulysses_exchanges_four_times_an_attention():
    calls = 4 * LAYERS * MICROBATCHES
    element = 4 * MICRO * SEQ // 4 * DEPTH * 3 / 4
    assert _traffic(context=4, context_method="ulysses")["world", "all_to_all"] == (
        calls,
        calls / 2 * (3 * HEADS + HEADS) * element,
    )


def test_a_ring_sends_keys_and_values_n_minus_1_times_and_with_gradients_n_times():
    element = 4 * MICRO * SEQ // 4 * DEPTH * HEADS
    attentions = LAYERS * MICROBATCHES
    assert _traffic(context=4)["world", "send"] == ((3 + 4) * attentions, (3 * 2 + 4 * 4) * attentions * element)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_hybrid_exchanges_along_one_axis_and_sends_round_the_other(kv_heads):
    traffic = _traffic(kv_heads=kv_heads, context=4, context_method="hybrid", context_ulysses=2)
    attentions, share = LAYERS * MICROBATCHES, 4 * MICRO * SEQ // 4 * DEPTH
    read = max(kv_heads, 2)  # a single one is read by both neighbours
    assert traffic["ulysses", "all_to_all"] == (4 * attentions, 2 * attentions * (2 * read + 2 * HEADS) * share / 2)
    half = 2 * share * read // 2  # the tokens of two, for half of the heads
    assert traffic["ring", "send"] == ((1 + 2) * attentions, (2 + 2 * 4) * attentions * half)


@pytest.mark.parametrize(
    ("schedule", "boundaries"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 3), ("loopedbfs", 3), ("interleavedzerobubble", 3),
     ("zbvzerobubble", 2), ("dualpipev", 2)],
)  # fmt: skip
def test_hidden_states_cross_each_boundary_of_a_pipeline_once_each_way(schedule, boundaries):
    traffic = _traffic(layers=4, ranks=2, pipeline=2, pipeline_schedule=schedule)
    calls = 2 * boundaries * MICROBATCHES
    assert traffic["world", "send"] == (calls / 2, calls / 2 * 4 * MICRO * SEQ * HIDDEN)
