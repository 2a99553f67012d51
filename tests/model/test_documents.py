"""Attention of packed documents against a dense mask, which is held here alone; and what it holds."""

import pytest
import torch
import torch.nn.functional as F

from polarlm.model import CausalAttention, Documents

LENGTH = 64
PACKED = {
    "one a row": [(64,), (64,)],
    "one token each": [(1,) * 64, (1,) * 64],
    "other borders in each row": [(3, 5, 56), (60, 1, 3)],
    "one row whole": [(64,), (2, 33, 1, 28)],
    "many lengths": [(13, 13, 9, 10, 11, 8), (1, 2, 4, 8, 16, 31, 2)],
}


def _ids(rows):
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def _dense(q, k, v, ids):
    mask = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("rows", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize(("precision", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_packed_documents_are_as_under_a_dense_mask(rows, precision, bound):
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, heads, LENGTH, 8, generator=generator, dtype=precision) for heads in (4, 2, 2, 4))
    inputs, ids = [x.requires_grad_() for x in (q, k, v)], _ids(rows)
    found, expected = CausalAttention()(*inputs, Documents(ids, q.device)), _dense(*inputs, ids)
    gradients = zip(*(torch.autograd.grad(output, inputs, grad) for output in (found, expected)), strict=True)
    for one, other in [(found, expected), *gradients]:
        assert (one - other).norm() <= bound * grad.norm()  # documents of one token give q no gradient but rounding


def test_dropout_drops_whole_probabilities_within_a_document():
    q = v = torch.ones(1, 1, LENGTH, 8)
    documents = Documents(_ids([(1,) * 32 + (32,)]), q.device)
    dropped = CausalAttention(dropout=0.5)(q, q, v, documents)
    assert set(dropped[:, :, :32].flatten().tolist()) == {0.0, 2.0}  # of one token: its one probability
    assert dropped[:, :, 32:].std() > 0.05
    assert torch.allclose(CausalAttention(dropout=0.5).eval()(q, q, v, documents), v)


def test_a_padded_document_grows_by_less_than_a_quarter():
    lengths = torch.arange(1, 3000)
    documents = Documents(torch.arange(len(lengths)).repeat_interleave(lengths)[None], torch.device("cpu"))
    packed = documents.pack(torch.ones(1, 1, int(lengths.sum()), 1))
    assert len(packed) <= 4 * 12  # calls: four for each power of two
    assert sum(part.numel() for part in packed) < 1.25 * lengths.sum()
    assert torch.equal(documents.unpack(packed), torch.ones(1, 1, int(lengths.sum()), 1))


def test_memory_does_not_grow_with_the_square_of_the_sequence():
    length, heads, depth = 8192, 2, 8
    ids = torch.arange(length)[None] // 700
    q = torch.randn(1, heads, length, depth, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        CausalAttention()(q, q, q, Documents(ids, q.device)).sum().backward()
    allocated = sum(max(event.self_device_memory_usage, event.self_cpu_memory_usage, 0) for event in profile.events())
    assert 0 < allocated < length**2 / 4  # bytes of all that ever was; a mask of bool alone has length²
