"""Context parallelism: the ranks of a context group share each sequence, and attention crosses the shares.

Ulysses (arXiv 2309.14509) trades sequence shares for head shares and back: two exchanges around an ordinary core, as
many again in backward, and no more ranks than heads. Ring attention (arXiv 2310.01889; `polarlm.parallel.ring`) sends
keys and values round the group and adds up partial softmaxes: no limit by heads. Its shares are zig-zag, chunk r and
chunk 2n-1-r of 2n, so that every rank has the same causal work (Brandon et al., arXiv 2311.09431, by another pattern;
Llama 3, arXiv 2407.21783).

The two make one grid (USP, arXiv 2405.07719; LoongTrain, 2406.18485): Ulysses among the u neighbours, where the network
is fastest, around a core that is a ring of c/u ranks. Either alone is the grid whose other side is 1.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polarlm.model import Documents, Transformer
from polarlm.parallel.ring import RingAttention, RingDocuments, take_chunks

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
    if ring is not None:
        model.documents = partial(RingDocuments, group=ring)


def take_share(whole: Tensor, rank: int, ring: int, ulysses: int = 1) -> Tensor:
    """[B, S] -> [B, S/(ring·ulysses)]: the tokens of a rank of a context group, whose neighbours share heads.

    Those of a ring's rank are a run each for its neighbours, so that they all have them in order once they have
    exchanged.
    """
    place, part = divmod(rank, ulysses)
    whole = take_chunks(whole, place, ring) if ring > 1 else whole
    return whole.chunk(ulysses, dim=1)[part]


class UlyssesAttention(nn.Module):
    """Around a core: all of the sequence for some of the heads."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self._group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        """q [B, A, S/n, D], k and v [B, K, S/n, D], documents of the whole sequence -> [B, A, S/n, D]."""
        ranks = dist.get_world_size(self._group)
        if k.shape[1] < ranks:  # fewer key heads than ranks: some ranks read the same one
            k, v = (x.repeat_interleave(ranks // k.shape[1], dim=1) for x in (k, v))
        heads = q.shape[1] // ranks, k.shape[1] // ranks, v.shape[1] // ranks
        # One exchange for all three: for each receiver its heads of q, k and v, side by side.
        parts = zip(*(x.chunk(ranks, dim=1) for x in (q, k, v)), strict=True)
        sent = torch.stack([torch.cat(part, dim=1) for part in parts])
        received = _exchange(sent, self._group)  # [n, B, heads, S/n, D], by the sequence share it is of
        q, k, v = received.movedim(0, 2).flatten(2, 3).split(heads, dim=1)
        attended = self.core(q, k, v, documents)
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
