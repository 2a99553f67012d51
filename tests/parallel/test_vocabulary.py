"""The loss over a head that ranks share by vocabulary: the one-process loss and gradients, chunk by chunk."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from polarlm.model import IGNORED, CrossEntropy
from polarlm.parallel.tensor import VocabularyParallelCrossEntropy
from ranks import run_ranks

ROWS, LENGTH, HIDDEN = 3, 172, 24  # 516 tokens are three chunks of 256, 256 and 4


def _inputs(vocabulary):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator)
    targets = torch.randint(vocabulary, (ROWS, LENGTH), generator=generator)
    targets[0, :60] = targets[2, 100:] = IGNORED
    return hidden, weight, targets


def _run(loss, hidden, weight, targets, extras):
    loss.z_loss, loss.label_smoothing = extras
    loss.rows = []
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    total = loss(hidden, weight, targets)
    total.backward()
    return total.item(), hidden.grad, weight.grad, loss.rows[0]


def _shared(world, vocabulary, extras):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    hidden, weight, targets = _inputs(vocabulary)
    hidden = distribute_tensor(hidden, mesh, [Shard(1)]).detach()
    weight = distribute_tensor(weight, mesh, [Shard(0)]).detach()
    total, hidden_grad, weight_grad, rows = _run(VocabularyParallelCrossEntropy(mesh), hidden, weight, targets, extras)
    whole = [gradient.redistribute(placements=[Replicate()]).to_local() for gradient in (hidden_grad, weight_grad)]
    return total, *whole, rows


@pytest.mark.parametrize("extras", [(0.0, 0.0), (1e-2, 0.1)], ids=["plain", "z-loss and smoothing"])
@pytest.mark.parametrize("vocabulary", [101, 4])  # 34, 34, 33 rows; 2, 2, and none
def test_the_one_process_loss_and_gradients(vocabulary, extras):
    expected = _run(CrossEntropy(), *_inputs(vocabulary), extras)
    for got in run_ranks(3, _shared, vocabulary, extras):
        assert got[0] == pytest.approx(expected[0], rel=1e-6)
        for ours, theirs in zip(got[1:], expected[1:], strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
