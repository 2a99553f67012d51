"""Causal self-attention with grouped key and value heads (arXiv 1706.03762, 2305.13245)."""

from collections.abc import Callable
from functools import cache
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.config import ModelConfig
from polarlm.model.documents import Documents
from polarlm.model.layers import Linear, build_norm
from polarlm.model.rotary import Rotation, rotate

_LARGEST_HEAD_DIM = 256  # of a flash kernel


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

    def forward(self, hidden: Tensor, rotation: Rotation | None, documents: Documents | None = None) -> Tensor:
        """hidden [B, S, H], rotation as from `Rotary` -> [B, S, H]; tokens attend within their own document."""
        q, k, v = (project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        attended = self.core(q, k, v, documents)
        return self.output(attended.transpose(1, 2).flatten(2))


class CausalAttention(nn.Module):
    """softmax(q kᵀ / √D) v over each token's past, by `scaled_dot_product_attention`.

    In training, `dropout` drops attention probabilities, as in GPT-2.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        """q [B, A, S, D], k and v [B, K, S, D] -> [B, A, S, D]; tokens attend within their own document.

        Query heads share key and value heads in order: query head a reads head a // (A / K).
        """
        return self._attend(q, k, v) if documents is None else self.attend_documents(q, k, v, documents)

    def attend_documents(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """As `forward`; memory grows with S, and work with the squares of the documents' lengths."""
        if documents.are_rows:
            return self._attend(q, k, v)
        if not self._dropped and has_varlen_kernel(q):
            return _attend_varlen(q, k, v, documents)
        packed = zip(*(documents.pack(x) for x in (q, k, v)), strict=True)
        return documents.unpack(self._attend(*alike) for alike in packed)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self._dropped, enable_gqa=q.shape[1] != k.shape[1]
        )

    @property
    def _dropped(self) -> float:
        return self.dropout if self.training else 0.0


def has_varlen_kernel(q: Tensor) -> bool:
    """Whether q's device has a flash kernel for sequences of many lengths, and flash kernels are allowed here.

    Torch has it for half precision without dropout, on GPUs from compute capability 8.0.
    """
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= _LARGEST_HEAD_DIM
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and torch.backends.cuda.flash_sdp_enabled()
        and _varlen_kernel() is not None
    )


@cache
def _varlen_kernel() -> Callable | None:
    """Torch's, where it has the form used here: from 2.12."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds, for it loads torch's compiler

    return varlen_attn if {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys() else None


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    kernel, rows = _varlen_kernel(), q.shape[0]
    assert kernel is not None
    attended = kernel(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)),
        *(documents.offsets, documents.offsets, documents.longest, documents.longest),
        window_size=(-1, 0),  # all of the past, none of the future
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended.unflatten(0, (rows, -1)).transpose(1, 2)
