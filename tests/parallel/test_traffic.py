"""The counter against collectives whose number and size are known."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from polarlm.config import ParallelConfig
from polarlm.parallel import Mesh, TrafficCounter
from ranks import run_ranks

FLOATS = 12  # of 4 bytes


def _counted(world, work, parallel):
    mesh = Mesh(ParallelConfig(ranks=world.size, **parallel), world)
    with TrafficCounter(mesh) as counter:
        work(mesh)
    return counter.calls, counter.bytes


def _plain(mesh):
    x = torch.ones(FLOATS)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(2 * FLOATS), x)
    dist.reduce_scatter_tensor(torch.empty(FLOATS // 2), x)
    dist.all_to_all_single(torch.empty(FLOATS), x)
    dist.broadcast(x, 0)


PLAIN = {
    ("world", "all_reduce"): (1, 48),
    ("world", "all_gather"): (1, 48),
    ("world", "reduce_scatter"): (1, 24),
    ("world", "all_to_all"): (1, 24),
    ("world", "broadcast"): (1, 24),
}


def _functional(mesh):
    x, group = torch.ones(FLOATS), dist.group.WORLD
    functional.all_reduce(x, "sum", group).wait()
    functional.all_gather_tensor(x, 0, group).wait()
    functional.reduce_scatter_tensor(x, "sum", 0, group).wait()
    functional.all_to_all_single(x, None, None, group).wait()
    functional.broadcast(x, 0, group).wait()


def _messages(mesh):
    """Both ways of sending: what one says the other hears, and only the saying counts."""
    x, other = torch.ones(FLOATS), 1 - dist.get_rank()
    requests = [dist.isend(x, other), dist.irecv(torch.empty(FLOATS), other)]
    operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty(FLOATS), other)]
    for request in requests + dist.batch_isend_irecv(operations):
        request.wait()


def _tensors_that_know_their_mesh(mesh):
    x = distribute_tensor(torch.ones(FLOATS), mesh.weights["tensor"], [Shard(0)], src_data_rank=None)
    x.redistribute(placements=[Replicate()]).to_local()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (_plain, PLAIN),
        (_functional, PLAIN),
        (_messages, {("world", "send"): (2, 96)}),
        (_tensors_that_know_their_mesh, {("world", "all_gather"): (1, 24)}),
    ],
)
def test_each_way_of_speaking_is_counted_once(work, expected):
    for calls, sizes in run_ranks(2, _counted, work, {"tensor": 2}):
        assert {key: (calls[key], sizes[key]) for key in calls} == expected


def _along_each_axis(mesh):
    for view in (mesh.tokens, mesh.weights):
        for axis in view.mesh_dim_names:
            dist.all_reduce(torch.ones(FLOATS), group=view[axis].get_group())
    dist.all_reduce(torch.ones(FLOATS))


def test_axes_are_told_apart_and_an_axis_of_one_says_nothing():
    parallel = {"tensor": 2, "context": 2, "zero_stage": 1}
    for calls, sizes in run_ranks(4, _counted, _along_each_axis, parallel):
        # The tensor axis is of both views; replicate has one rank, and so have the axes that are left out.
        assert calls == {
            (axis, "all_reduce"): n for axis, n in [("ring", 1), ("tensor", 2), ("shard", 1), ("world", 1)]
        }
        assert sizes["world", "all_reduce"] == 2 * 48 * 3 / 4
