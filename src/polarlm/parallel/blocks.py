"""Attention of one block of queries to one block of keys, of which several make a whole (arXiv 2205.14135, B.2).

By the device's flash kernel where it has one; else in plain products, a few queries at a time, so that scores of all
queries never exist.
"""

import torch
from torch import Tensor

from polarlm.parallel.kernels import has_fused_blocks

_QUERIES = 128  # whose scores plain products hold at a time


def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, is_plain: bool) -> tuple[Tensor, Tensor]:
    """(output [B, A, S, D], fp32 log of the softmax's sum [B, A, S]) of queries [B, A, S, D], keys and values
    [B, K, T, D].

    Args:
        is_causal: query i sees keys 0 to i, and S = T; else it sees all.
        is_plain: plain products, even where the device has a fused kernel.
    """
    k, v = _grouped(q, k), _grouped(q, v)
    if not is_plain and has_fused_blocks(q):
        if q.device.type == "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    k, v = k.float(), v.float()
    outputs, totals = [], []
    for rows, seen in _strips(q, k, is_causal):
        scores = _scores(q, k, rows, seen, is_causal)
        totals.append(scores.logsumexp(-1))
        outputs.append((scores - totals[-1][..., None]).exp() @ v[:, :, seen])
    return torch.cat(outputs, 2), torch.cat(totals, 2)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, is_causal: bool, is_plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's part of the gradients of q, k and v.

    Args:
        grad, output, total: of the queries, by all blocks together; the rest as in `attend`.
    """
    kv_heads = k.shape[1]
    k, v = _grouped(q, k), _grouped(q, v)
    if not is_plain and q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, total, 0.0, is_causal
        )
    else:
        grads = _plain_backward(grad.float(), q, k.float(), v.float(), output.float(), total, is_causal)
    q_grad, k_grad, v_grad = grads
    return q_grad, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (k_grad, v_grad))


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q_grads, k_grad, v_grad = [], torch.zeros_like(k), torch.zeros_like(v)
    mean = (grad * output).sum(-1, keepdim=True)  # of the probabilities' gradients, by the probabilities
    scale = q.shape[-1] ** -0.5
    for rows, seen in _strips(q, k, is_causal):
        probabilities = (_scores(q, k, rows, seen, is_causal) - total[:, :, rows, None]).exp()
        score_grad = probabilities * (grad[:, :, rows] @ v[:, :, seen].mT - mean[:, :, rows]) * scale
        q_grads.append(score_grad @ k[:, :, seen])
        k_grad[:, :, seen] += score_grad.mT @ q[:, :, rows].float()
        v_grad[:, :, seen] += probabilities.mT @ grad[:, :, rows]
    return torch.cat(q_grads, 2), k_grad, v_grad


def _strips(q: Tensor, k: Tensor, is_causal: bool) -> list[tuple[slice, slice]]:
    """(queries, keys that any of them sees) for a few queries after the other."""
    length = q.shape[2]
    rows = [slice(start, min(start + _QUERIES, length)) for start in range(0, length, _QUERIES)]
    return [(few, slice(0, few.stop if is_causal else k.shape[2])) for few in rows]


def _scores(q: Tensor, k: Tensor, rows: slice, seen: slice, is_causal: bool) -> Tensor:
    scores = q[:, :, rows].float() @ k[:, :, seen].mT * q.shape[-1] ** -0.5
    if not is_causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(rows.start + 1)
    return scores.masked_fill_(future, -torch.inf)


def _grouped(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values repeated to the query heads that read them."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
