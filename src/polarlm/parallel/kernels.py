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

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_IN_A_RING = ("flash", "math")


def attention_kernel(name: str) -> AbstractContextManager:
    """Within it, `scaled_dot_product_attention` runs on the kernel that `train.attention` names, or chooses itself."""
    return sdpa_kernel(list(_KERNELS.values()) if name == "auto" else _KERNELS[name])


def has_fused_blocks(q: Tensor) -> bool:
    """Whether the device has a fused kernel for one block of ring attention, which gives the log of its sums too."""
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16))


def choose_kernel(config: RunConfig, device: Device) -> str:
    """The kernel that computes a run's attention, tried on a few tokens: the one asked for, or torch's choice.

    Raises:
        UserError: the device has not the one asked for, with this model's dropout, precision or head dim.
    """
    asked, q_and_k = config.train.attention, _few_tokens(config, device)
    is_ring = config.parallel.ring > 1
    if is_ring:
        there = [name for name in _IN_A_RING if name == "math" or has_fused_blocks(q_and_k[0])]
    else:
        there = [name for name in _KERNELS if _runs(*q_and_k, config.model.dropout, name)]
    if asked in there:
        return asked
    if asked == "auto":
        return there[0] if is_ring else _torchs_choice(*q_and_k, config.model.dropout)
    model = config.model
    needs = [config.train.precision, f"head dim {model.head_dim}"]
    needs += [f"dropout {model.dropout}"] if model.dropout else []
    needs += ["ring attention"] if is_ring else []
    raise UserError(
        f"train.attention: {asked}, but {device.name} has no {asked} kernel for {', '.join(needs)}; "
        f"use {' or '.join(['auto', *there])}"
    )


def _few_tokens(config: RunConfig, device: Device) -> tuple[Tensor, Tensor]:
    """(q, k), as this run's attention would get them."""
    model, tokens = config.model, 16
    made = {"dtype": PRODUCT_TYPES[config.train.precision], "device": device.torch, "requires_grad": True}
    q = torch.zeros(1, 2, tokens, model.head_dim, **made)
    return q, torch.zeros(1, 2 if model.heads == model.kv_heads else 1, tokens, model.head_dim, **made)


def _runs(q: Tensor, k: Tensor, dropout: float, name: str) -> bool:
    grouped = q.shape[1] != k.shape[1]
    with attention_kernel(name), warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # torch tells of every kernel why it is none
        try:
            F.scaled_dot_product_attention(q, k, k, is_causal=True, dropout_p=dropout, enable_gqa=grouped)
        except RuntimeError:
            return False
    return True


def _torchs_choice(q: Tensor, k: Tensor, dropout: float) -> str:
    with attention_kernel("auto"):
        try:
            grouped = q.shape[1] != k.shape[1]
            chosen = torch._fused_sdp_choice(q, k, k, None, dropout, True, enable_gqa=grouped)
        except NotImplementedError:  # a device that has none to choose from
            return "math"
    return next(name for name, kernel in _KERNELS.items() if int(kernel.value) == chosen)
