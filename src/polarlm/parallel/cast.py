"""Parameters of a smaller type where every rank holds them whole; where they are shared out they are gathered so.

The model's own parameters stay fp32: they are what the optimizer changes, and what gradients are added up for. Each
part computes with copies that are cast when it begins, and a block that is computed again casts again.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polarlm.model import Transformer

_Place = tuple[nn.Module, str]  # a module, and the name it has the parameter under


def cast_parameters(model: Transformer, dtype: torch.dtype) -> None:
    """Let every part compute with its parameters in `dtype`, in place; their names and their own type stay.

    To be called before what repeats some of the work in backward, which then casts again too.
    """
    for block in model.blocks.values():
        places = _places(block.modules())
        block.transform_tokens = _casting(block.transform_tokens, places, dtype)
        block.forward = _casting(block.forward, places, dtype)
    ends = (part for part in (model.embedding, model.norm, model.head) if part is not None)
    model.forward = _casting(model.forward, _places(owner for end in ends for owner in end.modules()), dtype)


def _places(owners: Iterable[nn.Module]) -> list[list[_Place]]:
    """Where each of the parameters is found; a tied head's in two places."""
    places: dict[nn.Parameter, list[_Place]] = {}
    for owner in owners:
        for name, parameter in owner.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((owner, name))
    return list(places.values())


def _casting(call: Callable, places: list[list[_Place]], dtype: torch.dtype) -> Callable:
    def casting(*inputs: Any, **named: Any) -> Any:
        with _cast(places, dtype):
            return call(*inputs, **named)

    return casting


@contextmanager
def _cast(places: list[list[_Place]], dtype: torch.dtype) -> Iterator[None]:
    own = [getattr(*first) for first, *_ in places]
    try:
        _put(places, [parameter.to(dtype) for parameter in own])
        yield
    finally:
        _put(places, own)


def _put(places: list[list[_Place]], tensors: list[Tensor]) -> None:
    for alike, tensor in zip(places, tensors, strict=True):
        for owner, name in alike:
            owner._parameters[name] = tensor
