"""Which kernel computes attention, as `train.attention` says, and whether the device has it."""

import warnings
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polarlm.config import RunConfig, UserError
from polarlm.parallel.device import Device

# Of the matrix products, by `train.precision`.
PRODUCT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
_KERNELS = {"auto": [*_FUSED, SDPBackend.MATH], "flash": _FUSED, "math": [SDPBackend.MATH]}


def attention_kernel(name: str) -> AbstractContextManager:
    """Within it, `scaled_dot_product_attention` runs on the kernels that `train.attention` allows."""
    return sdpa_kernel(_KERNELS[name])


def has_fused_blocks(q: Tensor) -> bool:
    """Whether the device has a fused kernel for one block of ring attention, which gives the log of its sums too."""
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16))


def require_kernel(config: RunConfig, device: Device) -> None:
    """Try once, on a few tokens, that a run which asks for a fused kernel gets one.

    Raises:
        UserError: the device has none for this model's dropout, precision, head dim or masked documents.
    """
    if config.train.attention != "flash":
        return
    is_ring = config.parallel.ring > 1
    q, k, mask = _few_tokens(config, device)
    if has_fused_blocks(q) if is_ring else _runs(q, k, mask, config.model.dropout):
        return
    asked = [config.train.precision, f"head dim {config.model.head_dim}"]
    asked += [f"dropout {config.model.dropout}"] if config.model.dropout else []
    asked += ["masked documents"] if config.data.mask_documents else []
    asked += ["ring attention"] if is_ring else []
    raise UserError(
        f"train.attention: flash, but {device.name} has no fused kernel for {', '.join(asked)}; use auto or math"
    )


def _few_tokens(config: RunConfig, device: Device) -> tuple[Tensor, Tensor, Tensor | None]:
    """(q, k, mask), as this run's attention would get them."""
    model, tokens = config.model, 16
    made = {"dtype": PRODUCT_TYPES[config.train.precision], "device": device.torch, "requires_grad": True}
    q = torch.zeros(1, 2, tokens, model.head_dim, **made)
    k = torch.zeros(1, 2 if model.heads == model.kv_heads else 1, tokens, model.head_dim, **made)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device.torch).tril()
    return q, k, mask if config.data.mask_documents else None


def _runs(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> bool:
    grouped = q.shape[1] != k.shape[1]
    with attention_kernel("flash"), warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # torch tells of every kernel why it is none
        try:
            F.scaled_dot_product_attention(
                q, k, k, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=grouped
            )
        except RuntimeError:
            return False
    return True
