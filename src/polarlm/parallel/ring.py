"""Ring attention (arXiv 2310.01889): keys and values travel round a group, and partial softmaxes are added up.

Rank r of n holds chunks r and 2n-1-r of 2n, in this order, so that every rank has the same causal work. No pair of
ranks needs a mask: a rank's own tokens are causal, and of another rank's those that are seen at all are seen whole,
also where documents share a sequence: only one reaches from an earlier chunk into a later one.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polarlm.model import Documents
from polarlm.parallel.blocks import attend, attend_backward

# Queries and the keys that all of them see: indices of [B, A, S/n, D].
_Index = tuple[slice, slice, slice]
_Block = tuple[_Index, _Index]

_ALL = slice(None)


def take_chunks(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """[B, S] -> [B, S/n]: the tokens of a rank of a ring."""
    chunks = whole.chunk(2 * ranks, dim=1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim=1)


class RingAttention(nn.Module):
    """In place of a core: each rank's queries meet every rank's keys and values in turn."""

    def __init__(self, group: dist.ProcessGroup, is_plain: bool = False) -> None:
        """`is_plain`: plain products, even where the device has a fused kernel."""
        super().__init__()
        self._group, self._is_plain = group, is_plain

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: "RingDocuments | None" = None) -> Tensor:
        """q [B, A, S/n, D], k and v [B, K, S/n, D] -> [B, A, S/n, D]; tokens attend within their own document."""
        return _Ring.apply(q, k, v, documents, self._group, self._is_plain)


class RingDocuments:
    """The documents of whole sequences, as the ranks of a ring hold them.

    Attributes:
        own: those among this rank's tokens, where what is left of one is causal as the whole is.
    """

    def __init__(self, ids: Tensor, device: torch.device, group: dist.ProcessGroup) -> None:
        """Arguments as of `Documents`; ids of the whole sequences [B, S]."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        numbers = Documents(ids, device).numbers
        shares = [take_chunks(numbers, place, ranks) for place in range(ranks)]
        self.own = Documents(shares[rank], device)
        self._blocks = [_shared(shares[rank], theirs, rank, other) for other, theirs in enumerate(shares)]

    def blocks(self, other: int) -> list[_Block]:
        """Which of this rank's queries see which of another's keys."""
        return self._blocks[other]


class _Ring(torch.autograd.Function):
    """softmax(q kᵀ / √D) v by blocks: forward adds up (output, logsumexp) pairs, backward needs only their total."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, documents: RingDocuments | None, group: dist.ProcessGroup, is_plain: bool
    ) -> Tensor:
        rank = dist.get_rank(group)
        for other, (keys, values) in _round_the_ring(torch.stack([k, v]), group):
            if other == rank:  # the first to come
                output, total = _attend_own(q, keys, values, documents, is_plain)
                continue
            for queries, seen in _blocks(q, rank, other, documents):
                block, block_total = attend(q[queries], keys[seen], values[seen], False, is_plain)
                before = total[queries]
                after = torch.logaddexp(before, block_total)
                output[queries] = output[queries] * _weight(before, after) + block * _weight(block_total, after)
                total[queries] = after
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, total)
        ctx.documents, ctx.group, ctx.is_plain = documents, group, is_plain
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, output, total = ctx.saved_tensors
        rank, documents = dist.get_rank(ctx.group), ctx.documents
        # Gradients of keys and values travel with them, and after the whole round are back at their owner.
        travelling = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
        q_grad = torch.zeros_like(q, dtype=torch.float32)
        for other in _owners(ctx.group):
            keys, values, k_grad, v_grad = travelling
            for queries, seen in _blocks(q, rank, other, documents):
                block = grad[queries], q[queries], keys[seen], values[seen], output[queries], total[queries]
                if other == rank:
                    grads = _backward_own(*block, documents, ctx.is_plain)
                else:
                    grads = attend_backward(*block, False, ctx.is_plain)
                q_grad[queries] += grads[0]
                k_grad[seen] += grads[1]
                v_grad[seen] += grads[2]
                del grads
            travelling = _await(*_send_on(travelling, ctx.group))
        _, _, k_grad, v_grad = travelling
        return q_grad.to(q.dtype), k_grad, v_grad, None, None, None


def _blocks(q: Tensor, rank: int, other: int, documents: RingDocuments | None) -> list[_Block]:
    """Which queries [B, A, S/n, D] of a rank see which keys of another; for its own, causally, all see all."""
    if documents is not None:
        return documents.blocks(other)
    queries, seen = _places(rank, other, q.shape[2])
    return [((_ALL, _ALL, queries), (_ALL, _ALL, seen))]


def _places(rank: int, other: int, length: int) -> tuple[slice, slice]:
    """(places of a rank's queries, places of another's keys) such that all of the one come after all of the other.

    Queries are chunks (r, 2n-1-r), keys (j, 2n-1-j). Of an earlier rank's keys the first chunk lies before both of
    ours; of a later rank's both lie before our second chunk; no other pair of chunks is in order.
    """
    half = length // 2
    if other == rank:
        return _ALL, _ALL
    return (slice(0, length), slice(0, half)) if other < rank else (slice(half, length), slice(0, length))


def _shared(mine: Tensor, theirs: Tensor, rank: int, other: int) -> list[_Block]:
    """The blocks of documents that both ranks hold a part of; each rank's tokens int64 [B, S/n] by their documents.

    All of these keys come before all of these queries, so that in each row one document alone can be on both sides:
    that of the last key, if the first query is its too.
    """
    queries, seen = _places(rank, other, mine.shape[1])
    if other == rank:
        return [((_ALL, _ALL, queries), (_ALL, _ALL, seen))]
    document = mine[:, queries.start, None]
    last_query = queries.start + (mine[:, queries] == document).sum(1)
    first_key = seen.stop - (theirs[:, seen] == document).sum(1)
    extents = torch.stack([last_query, first_key], dim=1).tolist()
    rows = [slice(row, row + 1) for row in range(len(extents))]
    if extents.count(extents[0]) == len(extents):
        rows, extents = [_ALL], extents[:1]
    return [
        ((row, _ALL, slice(queries.start, end)), (row, _ALL, slice(start, seen.stop)))
        for row, (end, start) in zip(rows, extents, strict=True)
        if start < seen.stop
    ]


def _attend_own(
    q: Tensor, k: Tensor, v: Tensor, documents: RingDocuments | None, is_plain: bool
) -> tuple[Tensor, Tensor]:
    """As `attend`, causally, each document by itself; fp32."""
    if documents is None:
        output, total = attend(q, k, v, True, is_plain)
        return output.float(), total
    own = documents.own
    packed = zip(*map(own.pack, (q, k, v)), strict=True)
    outputs, totals = zip(*(attend(*alike, True, is_plain) for alike in packed), strict=True)
    return own.unpack(outputs).float(), own.unpack(total[..., None] for total in totals)[..., 0]


def _backward_own(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    total: Tensor,
    documents: RingDocuments | None,
    is_plain: bool,
) -> tuple[Tensor, ...]:
    """As `attend_backward`, causally, each document by itself."""
    if documents is None:
        return attend_backward(grad, q, k, v, output, total, True, is_plain)
    own = documents.own
    packed = zip(*map(own.pack, (grad, q, k, v, output, total[..., None])), strict=True)
    grads = [attend_backward(*block, of_all[..., 0], True, is_plain) for *block, of_all in packed]
    return tuple(map(own.unpack, zip(*grads, strict=True)))


def _round_the_ring(held: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, tensor) for every rank's tensor in turn, ours first; each is sent on while it is worked on."""
    *others, last = _owners(group)
    for owner in others:
        sending = _send_on(held, group)
        yield owner, held
        held = _await(*sending)
    yield last, held


def _owners(group: dist.ProcessGroup) -> list[int]:
    """Whose tensor a rank has before each turn of the ring."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return [(rank - turn) % ranks for turn in range(ranks)]


def _await(arriving: Tensor, requests: list[dist.Work]) -> Tensor:
    for request in requests:
        request.wait()
    return arriving


def _send_on(held: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = torch.empty_like(held)
    following, leading = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, held, following, group), dist.P2POp(dist.irecv, arriving, leading, group)]
    return arriving, dist.batch_isend_irecv(operations)


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total) [.., 1]: a block's share of the softmax."""
    return (part - total).exp()[..., None]
