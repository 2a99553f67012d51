"""Activation recomputation: activations that backward needs are computed again instead of kept (arXiv 1604.06174).

| `train.recompute` | a block keeps from forward to backward | and computes again |
|---|---|---|
| `none` | everything that backward needs | nothing |
| `selective` | its input, and what its weights' products give | attention, norms, activations, dropout |
| `full` | its input | all of it |

Selective recomputation (arXiv 2205.05198) keeps what is dear to compute; the products inside attention, of a size that
grows with the square of the sequence, are no products with weights. What is computed again draws the same dropout and
takes part in the same communication, so gradients are the same to the bit.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from polarlm.config import TrainConfig

# A product with a weight is one of two matrices, after its batch and sequence are flattened; attention's are batched.
_WEIGHT_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def recompute(blocks: Mapping[str, nn.Module], train: TrainConfig) -> None:
    """Put the run's recomputation on every n-th block, in place; modules and parameters keep their names.

    Args:
        blocks: by their number in the whole model, from 0, on whichever pipeline stage they are.
    """
    for number, block in blocks.items():
        if recomputes(number, train):
            block.forward = _POLICIES[train.recompute](block.forward)


def recomputes(number: str, train: TrainConfig) -> bool:
    """Whether the block of this number does."""
    return train.recompute != "none" and (int(number) + 1) % train.recompute_every == 0


# Each policy calls `checkpoint` in a function of its own, since torch's compiler passes over a block whose `forward` is
# one of torch's, or is told of the contexts by a variable.
def _full(forward: Callable) -> Callable:
    def recomputed(*inputs: Any) -> Tensor:
        return checkpoint(forward, *inputs, use_reentrant=False)

    return recomputed


def _selective(forward: Callable) -> Callable:
    def recomputed(*inputs: Any) -> Tensor:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=_keeping_weight_products)

    return recomputed


def _keeping_weight_products() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of forward and of computing it again."""
    return create_selective_checkpoint_contexts(_keep_weight_products)


def _keep_weight_products(context: SelectiveCheckpointContext, operation: Any, *args: Any, **options: Any):
    return CheckpointPolicy.MUST_SAVE if operation in _WEIGHT_PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


_POLICIES = {"full": _full, "selective": _selective}
