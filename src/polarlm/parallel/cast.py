"""Parameters of a smaller type on one process; on several, sharding gathers them so.

The model's own parameters stay fp32: they are what the optimizer changes, and what gradients are added up for. Each
part computes with copies that are cast when it begins, and a block that is computed again casts again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.model import Transformer


def cast_parameters(model: Transformer, dtype: torch.dtype) -> None:
    """Let every part compute with its parameters in `dtype`, in place; their names and their own type stay.

    To be called before what repeats some of the work in backward, which then casts again too.
    """
    for block in model.blocks.values():
        owners = list(block.modules())
        block.transform_tokens = _casting(block.transform_tokens, owners, dtype)
        block.forward = _casting(block.forward, owners, dtype)
    ends = (part for part in (model.embedding, model.norm, model.head) if part is not None)
    model.forward = _casting(model.forward, [owner for end in ends for owner in end.modules()], dtype)


def _casting(call: Callable, owners: Sequence[nn.Module], dtype: torch.dtype) -> Callable:
    def casting(*inputs: Any) -> Any:
        with _cast(owners, dtype):
            return call(*inputs)

    return casting


@contextmanager
def _cast(owners: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    own = [dict(owner._parameters) for owner in owners]
    casts: dict[int, Tensor] = {}  # by parameter, since a tied head has the embedding's
    try:
        for owner, parameters in zip(owners, own, strict=True):
            for name, parameter in parameters.items():
                if parameter is not None:
                    if id(parameter) not in casts:
                        casts[id(parameter)] = parameter.to(dtype)
                    owner._parameters[name] = casts[id(parameter)]
        yield
    finally:
        for owner, parameters in zip(owners, own, strict=True):
            owner._parameters.update(parameters)
