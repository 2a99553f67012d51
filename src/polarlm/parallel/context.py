"""Context parallelism: the ranks of a context group share each sequence, and attention crosses the shares.

Ulysses (arXiv 2309.14509) trades sequence shares for head shares and back: two exchanges around an ordinary core, as
many again in backward, and no more ranks than heads. Ring attention (arXiv 2310.01889) sends keys and values round the
group and adds up partial softmaxes: no limit by heads. Its shares are zig-zag, chunk r and chunk 2n-1-r of 2n, so that
every rank has the same causal work (Brandon et al., arXiv 2311.09431, by another pattern; Llama 3, arXiv 2407.21783).

The two make one grid (USP, arXiv 2405.07719; LoongTrain, 2406.18485): Ulysses among the u neighbours, where the network
is fastest, around a core that is a ring of c/u ranks. Either alone is the grid whose other side is 1.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polarlm.model import Transformer
from polarlm.parallel.kernels import has_fused_blocks

_SEQUENCE = 2  # dim of q, k, v [B, A, S, D]


def share_sequences(
    model: Transformer, ring: dist.ProcessGroup | None, ulysses: dist.ProcessGroup | None, is_plain: bool = False
) -> None:
    """Let every block's attention cross the shares of a context group, in place.

    Args:
        ring, ulysses: this rank's groups along the two axes of a context group; None along one of one rank.
        is_plain: a ring's blocks are plain products, even where the device has a fused kernel.
    """
    for block in model.blocks.values():
        attention = block.attention
        if ring is not None:
            attention.core = RingAttention(ring, is_plain)
        if ulysses is not None:
            attention.core = UlyssesAttention(attention.core, ulysses)


def take_share(whole: Tensor, rank: int, ring: int, ulysses: int = 1) -> Tensor:
    """[B, S] -> [B, S/(ring·ulysses)]: the tokens of a rank of a context group, whose neighbours share heads.

    Rank r of a ring of n has chunks r and 2n-1-r of 2n, and its neighbours a run of these each, so that they all have
    them in order once they have exchanged.
    """
    place, part = divmod(rank, ulysses)
    if ring > 1:
        chunks = whole.chunk(2 * ring, dim=1)
        whole = torch.cat([chunks[place], chunks[2 * ring - 1 - place]], dim=1)
    return whole.chunk(ulysses, dim=1)[part]


class UlyssesAttention(nn.Module):
    """Around a core: all of the sequence for some of the heads."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self._group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """q [B, A, S/n, D], k and v [B, K, S/n, D], document_ids int [B, S] of the whole sequence -> [B, A, S/n, D]."""
        ranks = dist.get_world_size(self._group)
        if k.shape[1] < ranks:  # fewer key heads than ranks: some ranks read the same one
            k, v = (x.repeat_interleave(ranks // k.shape[1], dim=1) for x in (k, v))
        heads = q.shape[1] // ranks, k.shape[1] // ranks, v.shape[1] // ranks
        # One exchange for all three: for each receiver its heads of q, k and v, side by side.
        parts = zip(*(x.chunk(ranks, dim=1) for x in (q, k, v)), strict=True)
        sent = torch.stack([torch.cat(part, dim=1) for part in parts])
        received = _exchange(sent, self._group)  # [n, B, heads, S/n, D], by the sequence share it is of
        q, k, v = received.movedim(0, 2).flatten(2, 3).split(heads, dim=1)
        attended = self.core(q, k, v, document_ids)
        back = _exchange(torch.stack(attended.chunk(ranks, dim=_SEQUENCE)), self._group)
        return back.movedim(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(parts.contiguous(), group)


class _Exchange(torch.autograd.Function):
    """Part i of [n, ...] goes to rank i; gradients go back the way they came."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad, group=ctx.group)
        return received, None


class RingAttention(nn.Module):
    """In place of a core: each rank's queries meet every rank's keys and values in turn."""

    def __init__(self, group: dist.ProcessGroup, is_plain: bool = False) -> None:
        super().__init__()
        self._group, self._is_plain = group, is_plain

    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """q [B, A, S/n, D], k and v [B, K, S/n, D], document_ids int [B, S] of the whole sequence -> [B, A, S/n, D]."""
        return _Ring.apply(q, k, v, document_ids, self._group, self._is_plain)


class _Ring(torch.autograd.Function):
    """softmax(q kᵀ / √D) v by blocks: forward adds up (output, logsumexp) pairs, backward needs only their total."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        document_ids: Tensor | None,
        group: dist.ProcessGroup,
        is_plain: bool,
    ) -> Tensor:
        output = torch.zeros_like(q, dtype=torch.float32)
        total = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
        for meeting, (keys, values) in _round_the_ring(torch.stack([k, v]), group):
            rows, columns, is_causal = meeting.blocks(q.shape[_SEQUENCE])
            mask = meeting.mask(document_ids, rows, columns, is_causal)
            block, block_total = _attend(
                q[:, :, rows], keys[:, :, columns], values[:, :, columns], is_causal, mask, is_plain
            )
            before = total[:, :, rows]
            after = torch.logaddexp(before, block_total)
            output[:, :, rows] = output[:, :, rows] * _weight(before, after) + block * _weight(block_total, after)
            total[:, :, rows] = after
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, total, document_ids)
        ctx.group, ctx.is_plain = group, is_plain
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, output, total, document_ids = ctx.saved_tensors
        q_grad = torch.zeros_like(q, dtype=torch.float32)
        # Gradients of keys and values travel with them, and after the whole round are back at their owner.
        traveller = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
        for meeting, (keys, values, k_grad, v_grad) in _round_the_ring(traveller, ctx.group, comes_home=True):
            rows, columns, is_causal = meeting.blocks(q.shape[_SEQUENCE])
            mask = meeting.mask(document_ids, rows, columns, is_causal)
            grads = _attend_backward(
                grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns],
                output[:, :, rows], total[:, :, rows], is_causal, mask, ctx.is_plain,
            )  # fmt: skip
            q_grad[:, :, rows] += grads[0]
            k_grad[:, :, columns] += grads[1]
            v_grad[:, :, columns] += grads[2]
        return q_grad.to(q.dtype), traveller[2], traveller[3], None, None, None


class _Meeting:
    """Rank r's queries with the keys of rank j."""

    def __init__(self, rank: int, other: int, ranks: int) -> None:
        self.rank, self.other, self.ranks = rank, other, ranks

    def blocks(self, length: int) -> tuple[slice, slice, bool]:
        """Which of the local queries see which of the other's keys, and whether causally; no other pair sees another.

        Queries are chunks (r, 2n-1-r), keys (j, 2n-1-j). Of an earlier rank's keys the first chunk lies before both of
        ours; of a later rank's keys both lie before our second chunk.
        """
        half = length // 2
        if self.other == self.rank:
            return slice(0, length), slice(0, length), True
        if self.other < self.rank:
            return slice(0, length), slice(0, half), False
        return slice(half, length), slice(0, length), False

    def mask(self, document_ids: Tensor | None, rows: slice, columns: slice, is_causal: bool) -> Tensor | None:
        """bool [B, 1, rows, columns]: the pairs of one document; None where every pair is."""
        if document_ids is None:
            return None
        mine, theirs = (take_share(document_ids, rank, self.ranks) for rank in (self.rank, self.other))
        same = mine[:, None, rows, None] == theirs[:, None, None, columns]
        return same.tril() if is_causal else same


def _round_the_ring(tensor: Tensor, group: dist.ProcessGroup, comes_home: bool = False):
    """Yield (meeting, tensor) for every rank's tensor in turn, ours first; work on it is overlapped with its sending on
    unless it comes home changed, for then each must be finished before it travels."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    home, held = tensor, tensor.contiguous()
    for turn in range(ranks):
        is_last = turn == ranks - 1
        sending = None if comes_home or is_last else _send_on(held, group)
        yield _Meeting(rank, (rank - turn) % ranks, ranks), held
        if comes_home or not is_last:
            arrived, requests = sending or _send_on(held, group)
            for request in requests:
                request.wait()
            held = arrived
    if comes_home:
        home.copy_(held)


def _send_on(held: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = torch.empty_like(held)
    following, leading = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, held, following, group), dist.P2POp(dist.irecv, arriving, leading, group)]
    return arriving, dist.batch_isend_irecv(operations)


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total) [.., 1]: a block's share of the softmax; 0 where nothing has been seen yet."""
    return torch.where(part == -torch.inf, 0.0, (part - total).exp())[..., None]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mask: Tensor | None, is_plain: bool
) -> tuple[Tensor, Tensor]:
    """(output [B, A, S, D], logsumexp [B, A, S]) of one block, by the device's flash kernel where it has one."""
    k, v = _grouped(q, k), _grouped(q, v)
    if mask is None and not is_plain and has_fused_blocks(q):
        if q.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    scores = _scores(q, k, is_causal, mask)
    total = scores.logsumexp(-1)
    return torch.nan_to_num((scores - total[..., None]).exp()) @ v.float(), total


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    total: Tensor,
    is_causal: bool,
    mask: Tensor | None,
    is_plain: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block's q, k, v, by the output and logsumexp of all blocks together (arXiv 2205.14135, B.2)."""
    kv_heads = k.shape[1]
    k, v = _grouped(q, k), _grouped(q, v)
    if mask is None and not is_plain and q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, total, 0.0, is_causal
        )
    else:
        probabilities = torch.nan_to_num((_scores(q, k, is_causal, mask) - total[..., None]).exp())
        grad, output = grad.float(), output.float()
        score_grad = probabilities * (grad @ v.float().mT - (grad * output).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        grads = score_grad @ k.float(), score_grad.mT @ q.float(), probabilities.mT @ grad
    q_grad, k_grad, v_grad = grads
    return q_grad, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (k_grad, v_grad))


def _grouped(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values repeated to the query heads that read them."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor:
    scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
    if mask is None and is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)
