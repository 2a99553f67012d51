"""Ring attention's gradients with documents against a dense mask, and what it holds."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from polarlm.parallel.blocks import attend, attend_backward
from polarlm.parallel.ring import RingAttention, RingDocuments
from ranks import run_ranks

LENGTH, RANKS = 1200, 2  # shares longer than the strips of plain products
PACKED = {
    "one a row": [(1200,), (1200,)],
    "one token each": [(1,) * 1200, (1,) * 1200],
    "other borders in each row": [(600, 600), (299, 2, 500, 399)],
    "over every chunk of one row": [(100, 1100), (1,) * 500 + (700,)],
}


def _ids(rows):
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def _inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, LENGTH, 8, generator=generator) for heads in (4, 2, 2, 4)]


def _share(x, rank):
    chunks = x.chunk(2 * RANKS, 2)
    return torch.cat([chunks[rank], chunks[2 * RANKS - 1 - rank]], 2)


def _gradients(world, packed, is_plain):
    group = dist.new_group(list(range(world.size)))
    *inputs, grad = (_share(x, world.rank) for x in _inputs())
    inputs = [x.contiguous().requires_grad_() for x in inputs]
    documents = RingDocuments(_ids(packed), torch.device("cpu"), group)
    output = RingAttention(group, is_plain)(*inputs, documents)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_documents_in_a_ring_are_as_under_a_dense_mask_in_float64(packed, is_plain):
    *inputs, grad = (x.double() for x in _inputs())
    inputs, ids = [x.requires_grad_() for x in inputs], _ids(packed)
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    output = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    expected = [output, *torch.autograd.grad(output, inputs, grad)]
    for rank, results in enumerate(run_ranks(RANKS, _gradients, packed, is_plain)):
        for found, whole in zip(results, expected, strict=True):
            assert (found - _share(whole, rank)).norm() <= 2e-6 * grad.norm()


def test_plain_products_never_hold_the_scores_of_all_queries():
    length = 2048
    q = torch.randn(1, 1, length, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        output, total = attend(q, q, q, True, is_plain=True)
        attend_backward(output, q, q, q, output, total, True, is_plain=True)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < 4 * length**2 / 8
