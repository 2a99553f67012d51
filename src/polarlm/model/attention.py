"""Causal self-attention with grouped key and value heads (arXiv 1706.03762, 2305.13245)."""

import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.config import ModelConfig
from polarlm.model.layers import Linear, build_norm
from polarlm.model.rotary import Rotation, rotate


class Attention(nn.Module):
    """Projections around a replaceable `core`.

    Head counts are read off the projections' width, so that matrices sharded by heads need no other change.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(config.hidden, width, bias=config.qkv_bias)
        self.k = Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.v = Linear(config.hidden, kv_width, bias=config.qkv_bias)
        self.q_norm = build_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = build_norm(config, config.head_dim) if config.qk_norm else None
        self.core: nn.Module = CausalAttention(config.dropout)
        self.output = Linear(width, config.hidden, bias=config.bias)

    def forward(self, hidden: Tensor, rotation: Rotation | None, document_ids: Tensor | None = None) -> Tensor:
        """hidden [B, S, H], rotation as from `Rotary`, document_ids int [B, S] -> [B, S, H]."""
        q, k, v = (project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        attended = self.core(q, k, v, document_ids)
        return self.output(attended.transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """softmax(q kᵀ / √D) v over each token's past, by `scaled_dot_product_attention`.

    In training, `dropout` drops attention probabilities, as in GPT-2.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """q [B, A, S, D], k and v [B, K, S, D], document_ids int [B, S] or None -> [B, A, S, D].

        Query heads share key and value heads in order: query head a reads head a // (A / K). With `document_ids`,
        tokens attend only within their own document.
        """
        mask = None if document_ids is None else _same_document(document_ids).tril()
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,  # without a mask the flash kernels skip the future
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def _same_document(document_ids: Tensor) -> Tensor:
    """document_ids int [B, S] -> bool [B, 1, S, S]."""
    return document_ids[:, None, :, None] == document_ids[:, None, None, :]
