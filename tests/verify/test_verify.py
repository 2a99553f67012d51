"""`verify` itself: that right layouts pass, wrong ones fail by name, and none is left out in silence."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from polarlm.model import IGNORED, CrossEntropy
from polarlm.parallel import Engine, build, replicas
from polarlm.parallel.replicas import Replicas
from polarlm.parallel.ring import RingDocuments
from polarlm.verify import Table, parse_layout
from polarlm.verify.run import verify


def _rows(*names, flags=(), ranks=4):
    return {(row.layout, row.model): row for row in verify([parse_layout(name) for name in names], flags, ranks)}


def test_right_layouts_pass():
    rows = _rows("alone", "zero3-data2", "tensor2", "pipeline2-dualpipev")
    assert {key: row.verdict for key, row in rows.items()} == dict.fromkeys(rows, "ok")
    assert [key[1] for key in rows] == ["gpt", "llama"] * 4
    for (_, model), row in rows.items():
        assert list(row.gradients) == list(row.weights) == list(rows["alone", model].gradients)
        assert 0 < max(row.gradients.values()) < 1e-5
        assert 0 < max(row.weights.values()) < 1e-5


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 2e-2), ("fp16", 4e-3)])
def test_half_precision_passes_within_its_own_bound(precision, bound):
    (row,) = _rows("data2", flags=["--train.precision", precision, "--model.family", "llama", *SMALL]).values()
    assert row.verdict == "ok"
    assert 1e-4 < max(row.gradients.values()) < row.bound == bound


SMALL = ["--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.vocab-size", "61"]
LLAMA = ["--model.family", "llama", *SMALL, "--data.mask-documents", "true"]


def test_what_the_ranks_or_the_shape_do_not_allow_is_a_row_that_says_why():
    rows = _rows("data8", "tensor4-ulysses2", "tensor3", flags=SMALL, ranks=8 - 1)
    assert {row.verdict for row in rows.values()} == {"not tried"}
    reasons = {layout: row.reason for (layout, _), row in rows.items()}
    assert reasons["data8"] == "it takes 8 ranks, and there are 7"
    assert reasons["tensor3"].startswith("parallel.tensor: model.heads 4 is not a multiple of tensor 3")


def _not_summed_over_data(monkeypatch):
    monkeypatch.setattr(Replicas, "_send", lambda *_: None)


def _norms_not_summed_over_tensor(monkeypatch):
    right = replicas._settled

    def settled(parameter):
        if parameter.ndim == 1:
            local = parameter.grad.to_local()
            parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements)
        return right(parameter)

    monkeypatch.setattr(replicas, "_settled", settled)


def _loss_mask_shifted(monkeypatch):
    right = CrossEntropy.forward

    def forward(self, hidden, head_weight, targets):
        if dist.get_rank() == 1:
            is_trained = (targets != IGNORED).roll(1, 1)
            targets = torch.where(is_trained, targets.clamp(min=0), IGNORED)
        return right(self, hidden, head_weight, targets)

    monkeypatch.setattr(CrossEntropy, "forward", forward)


def _documents_shifted(monkeypatch):
    right = RingDocuments.__init__

    def init(self, ids, device, group):
        right(self, ids.roll(1, 1) if dist.get_rank() == 1 else ids, device, group)

    monkeypatch.setattr(RingDocuments, "__init__", init)


def _positions_not_shared(monkeypatch):
    right = Engine._share

    def share(self, batch):
        tokens, _, document_ids, targets = right(self, batch)
        return tokens, batch[1][:, : tokens.shape[1]], document_ids, targets

    monkeypatch.setattr(Engine, "_share", share)


def _mean_over_data(monkeypatch):
    right = FSDPModule.set_gradient_divide_factor
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, _: right(self, 2.0))


@pytest.mark.parametrize(
    ("mutation", "layout", "first_wrong"),
    [
        (_not_summed_over_data, "data2", "embedding.tokens.weight"),
        (_norms_not_summed_over_tensor, "tensor2", "blocks.0.attention_norm.weight"),
        (_loss_mask_shifted, "data2", "embedding.tokens.weight"),
        (_documents_shifted, "ring2", "embedding.tokens.weight"),
        (_positions_not_shared, "ulysses2", "embedding.tokens.weight"),
        (_mean_over_data, "zero3-data2", "embedding.tokens.weight"),
    ],
)
def test_what_is_wrong_fails_and_the_first_wrong_parameter_is_named(monkeypatch, mutation, layout, first_wrong):
    mutation(monkeypatch)
    (row,) = _rows(layout, flags=LLAMA).values()
    assert (row.verdict, row.reason, row.first_wrong) == ("FAILED", "", first_wrong)
    line = Table([layout], ["own"]).line(row)
    assert "  FAILED: " in line
    assert line.endswith(f"; first wrong is {first_wrong}")
    wrong = [name for name, difference in row.gradients.items() if difference > 1e-5]
    if mutation is _norms_not_summed_over_tensor:
        assert wrong == [name for name in row.gradients if "norm" in name]
    else:
        assert len(wrong) == len(row.gradients)


def test_a_rank_that_fails_fails_its_layout_alone(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no head for this")

    monkeypatch.setattr(build, "share_matrices", fail)
    rows = _rows("tensor2", "data2", flags=SMALL)
    assert [row.verdict for row in rows.values()] == ["FAILED", "ok"]
    assert rows["tensor2", "own"].reason == "RuntimeError: no head for this"
    assert "Traceback" in capsys.readouterr().err
