"""What a step really sends against the textbook, by layout; one collective more fails."""

import pytest
import torch
import torch.distributed as dist

from polarlm.parallel import Engine
from polarlm.verify import parse_layout
from polarlm.verify.run import count_traffic

BATCH = ["--train.global-batch-size", "8"]
LAYOUTS = {  # the axes and collectives that each must be seen to use
    "alone": set(),
    "data2": {("replicate", "all_reduce")},
    "zero1-data2": {("shard", "all_gather"), ("shard", "reduce_scatter"), ("shard", "all_reduce")},
    "zero2-groups2-data4": {("shard", "reduce_scatter"), ("replicate", "all_reduce"), ("world", "all_reduce")},
    "zero3-data2": {("shard", "all_gather"), ("shard", "reduce_scatter")},
    "tensor2": {("tensor", "all_gather"), ("tensor", "reduce_scatter"), ("tensor", "all_reduce")},
    "ulysses2": {("replicate/ulysses", "all_to_all"), ("replicate/ulysses", "all_reduce")},
    "pipeline2-interleaved1f1b": {("pipeline", "send")},
    "pipeline2-1f1b-zero2-data2": {("pipeline", "send"), ("shard", "reduce_scatter")},
    "ring2": {("replicate/ring", "send")},
    "ulysses2-tensor2": {("ulysses", "all_to_all"), ("tensor", "all_gather"), ("replicate", "all_reduce")},
    "hybrid4": {("ulysses", "all_to_all"), ("ring", "send"), ("replicate", "all_reduce")},
}
HALVED = {
    "zero3-data2": {"all_gather"},
    "ulysses2": {"all_to_all"},
    "pipeline2-1f1b": {"send"},
}


def _rows(name):
    return list(count_traffic([parse_layout(name)], BATCH, 4))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_the_textbook_says(name):
    for row in _rows(name):
        wrong = [amount for amount in row.amounts if not amount.agrees]
        assert (row.verdict, row.reason, wrong) == ("ok", "", [])
        assert {(amount.axis, amount.kind) for amount in row.amounts} >= LAYOUTS[name]
        assert all(amount.bytes == pytest.approx(amount.textbook_bytes) for amount in row.amounts)


@pytest.mark.parametrize("name", HALVED)
def test_with_bf16_parameters_all_but_gradients_is_half_of_it(name):
    bf16 = ["--train.precision", "bf16", "--train.parameter-precision", "bf16"]
    for row in count_traffic([parse_layout(name)], [*BATCH, *bf16], 2):
        wrong = [amount for amount in row.amounts if not amount.agrees]
        assert (row.verdict, row.reason, wrong) == ("ok", "", [])
    textbook, in_fp32 = (
        {amount.kind: amount.textbook_bytes for amount in row.amounts}
        for row in (row, list(count_traffic([parse_layout(name)], BATCH, 2))[-1])
    )
    halved = {kind for kind, size in textbook.items() if size == in_fp32[kind] / 2}
    assert halved == HALVED[name]
    assert all(size == in_fp32[kind] for kind, size in textbook.items() if kind not in halved)


@pytest.mark.parametrize("name", ["data2", "zero1-groups2-data4"])
def test_one_collective_more_fails(monkeypatch, name):
    right = Engine.clip_gradients

    def clip_and_say_more(self, *arguments):
        dist.all_reduce(torch.zeros(1))
        return right(self, *arguments)

    monkeypatch.setattr(Engine, "clip_gradients", clip_and_say_more)
    for row in _rows(name):
        assert row.verdict == "FAILED"
        (wrong,) = [amount for amount in row.amounts if not amount.agrees]
        assert (wrong.kind, wrong.calls) == ("all_reduce", wrong.textbook_calls + row.ranks)


def test_what_the_formulas_do_not_hold_for_is_not_tried():
    (row,) = count_traffic([parse_layout("zero3-data2-offload")], BATCH, 2)
    assert row.verdict == "not tried"
    assert row.reason.startswith("parallel.offload: ")
