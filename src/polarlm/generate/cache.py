"""Keys and values of the tokens a model has read, so that each new token costs one token's work."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.model import Documents, Transformer


class KVCache:
    """Puts a cached attention into each block of a model, for as long as its context lasts.

    Rows may be padded anywhere: a pad is seen by no token, and positions count real tokens only. Inside the context
    call `read` in place of the model; afterwards the model is as it was, and may go on training.
    """

    def __init__(self, model: Transformer, capacity: int) -> None:
        """`capacity`: columns to make room for, pads among them."""
        self.model, self.capacity = model, capacity
        self.length = 0  # columns read so far
        self.mask: Tensor | None = None  # bool [B, 1, columns now read, columns so far]: who sees whom
        self._is_real: Tensor | None = None  # bool [B, columns so far]

    def __enter__(self) -> "KVCache":
        attentions = [block.attention for block in self.model.blocks.values()]
        self._cores = [(attention, attention.core) for attention in attentions]
        for attention in attentions:
            attention.core = CachedAttention(self)
        return self

    def __exit__(self, *exception: object) -> None:
        for attention, core in self._cores:
            attention.core = core

    @torch.no_grad()
    def read(self, tokens: Tensor, is_real: Tensor) -> Tensor:
        """Let the model read the next columns.

        Args:
            tokens: int64 [B, S], the same rows at every call.
            is_real: bool [B, S], False for pads.

        Returns:
            Logits [B, S, V]; those of pads mean nothing.
        """
        assert self.length + tokens.shape[1] <= self.capacity, "the cache has no room left"
        seen = is_real if self._is_real is None else torch.cat((self._is_real, is_real), 1)
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, self.length :]
        columns = torch.arange(seen.shape[1], device=seen.device)
        new = columns[self.length :, None]
        # A pad sees itself, for a softmax over nothing is not a number.
        self.mask = ((columns <= new) & seen[:, None, None, :]) | (columns == new)
        self._is_real = seen
        logits = self.model(tokens, positions)
        self.length = seen.shape[1]
        return logits


class CachedAttention(nn.Module):
    """Attention of the columns now read over all columns so far; in place of `attention.core`."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        """q [B, A, S, D], k and v [B, K, S, D] of the new columns -> [B, A, S, D]."""
        assert documents is None, "a cached row is one document"
        if self.keys is None or self.values is None:
            room = (*k.shape[:2], self.cache.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(room), v.new_empty(room)
        start, end = self.cache.length, self.cache.length + k.shape[2]
        self.keys[:, :, start:end], self.values[:, :, start:end] = k, v
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.cache.mask, enable_gqa=grouped)
