"""Long sequences a part at a time, where tokens know nothing of each other.

Attention apart, everything in a block is done to each token alone: norm, feed-forward, dropout. Done to `tile` tokens
of a sequence after one another, and again in backward, it holds a tile's intermediates (of the feed-forward's width,
several times that of the hidden states) and not a sequence's; gradients are the same sums (ALST, arXiv 2506.13996).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polarlm.model import Block


def tile_feed_forward(blocks: Iterable[Block], tile: int) -> None:
    """Let each block's second half, norm and feed-forward, take that many tokens of its sequences at a time, in place.

    Under tensor parallelism a tile is of this rank's tokens, so that each gathers and scatters its own.
    """
    for block in blocks:
        block.transform_tokens = _tiled(block.transform_tokens, tile)


def _tiled(transform: Callable[[Tensor], Tensor], tile: int) -> Callable[[Tensor], Tensor]:
    def tiled(hidden: Tensor) -> Tensor:
        parts = hidden.split(tile, dim=1)
        if len(parts) == 1:
            return transform(hidden)
        return torch.cat([checkpoint(transform, part, use_reentrant=False) for part in parts], dim=1)

    return tiled
