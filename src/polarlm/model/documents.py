"""Documents that share rows of tokens: where they begin, and their attention without a mask of S x S.

A kernel for sequences of many lengths takes the offsets as they are. For any other kernel documents of about one length
are laid side by side, padded at their ends, where causal attention of a real token never looks: a call for each length
that occurs, up to a quarter, and no mask at all.
"""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

_SIGNIFICANT_BITS = 3  # of a padded length, so that a document grows by less than a quarter


class Documents:
    """The documents of a batch of rows; made once for all blocks.

    Attributes:
        numbers: int64 [B, S], each token's document, counted from 1 in every row; on the host.
        lengths: int64 [n], tokens of each document, row after row; on the host.
    """

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        """
        Args:
            ids: int [B, S]; a document is a run of one id. Ids that lie on a device are waited for.
            device: where attention will be.
        """
        ids = ids.cpu()
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = begins.flatten().nonzero()[:, 0]
        self.numbers = begins.cumsum(1)
        self.lengths = starts.diff(append=starts.new_tensor([ids.numel()]))
        self._device = device

    @property
    def are_rows(self) -> bool:
        """Whether each row is one document."""
        return len(self.lengths) == len(self.numbers)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest."""
        return int(self.lengths.max())

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [n + 1]: where each begins among the tokens of all rows, and where the last one ends."""
        ends = self.lengths.cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).int().to(self._device, non_blocking=True)

    def pack(self, x: Tensor) -> list[Tensor]:
        """[B, A, S, D] -> m documents of up to L tokens [m, A, L, D], for each length L; zeros after their ends."""
        slots, shapes = self._layout
        sizes = [count * length for count, length in shapes]
        tokens = x.transpose(1, 2).flatten(0, 1)
        packed = tokens.new_zeros(sum(sizes), *tokens.shape[1:]).index_copy_(0, slots, tokens)
        return [
            part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(packed.split(sizes), shapes, strict=True)
        ]

    def unpack(self, parts: Iterable[Tensor]) -> Tensor:
        """The other way round: what `pack` gives, in its order -> [B, A, S, D]."""
        packed = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
        tokens = packed.index_select(0, self._layout[0])
        return tokens.unflatten(0, self.numbers.shape).transpose(1, 2)

    @cached_property
    def _layout(self) -> tuple[Tensor, list[tuple[int, int]]]:
        """(slot int64 [B S] of each token among the packed ones, how many documents lie side by side and how long)."""
        kinds = _rounded_up(self.lengths)
        slot_of_first, shapes, taken = torch.empty_like(self.lengths), [], 0
        for kind in kinds.unique():
            alike = kinds == kind
            count, length = int(alike.sum()), int(self.lengths[alike].max())
            slot_of_first[alike] = taken + torch.arange(count) * length
            shapes.append((count, length))
            taken += count * length
        starts = self.lengths.cumsum(0) - self.lengths
        slots = (slot_of_first - starts).repeat_interleave(self.lengths) + torch.arange(self.numbers.numel())
        return slots.to(self._device, non_blocking=True), shapes


def _rounded_up(lengths: Tensor) -> Tensor:
    """Each to so many significant bits."""
    bits = lengths.double().log2().floor().long() + 1
    unit = 1 << (bits - _SIGNIFICANT_BITS).clamp(min=0)
    return (lengths + unit - 1) // unit * unit
