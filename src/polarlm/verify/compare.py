"""How far a layout's numbers are from the reference's, and whether that is rounding."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Largest relative difference that still is rounding. fp32 has 24 bits, and every layout adds up in another order; bf16
# has 8 and fp16 11, and gradients of the small models were seen to differ by up to 7e-3 and 1e-3, on one process as on
# several.
BOUNDS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}

_SMALL = 0.01  # of the norm of all: beside it counts what should be zero, such as a key's bias, and is rounding alone

Differences = dict[str, float]


def differences(found: Iterable[tuple[str, "Tensor | None"]], expected: Mapping[str, "Tensor"]) -> Differences:
    """‖found - expected‖ / (‖expected‖ + 1 % of the norm of all expected), by name; NaN for none, or for one of
    a name or a shape that is not expected."""
    whole = math.sqrt(sum(tensor.double().norm().item() ** 2 for tensor in expected.values()))
    return {name: _difference(tensor, expected.get(name), whole) for name, tensor in found}


def _difference(found: "Tensor | None", expected: "Tensor | None", whole: float) -> float:
    if found is None or expected is None or found.shape != expected.shape:
        return math.nan
    expected = expected.double()
    apart = (found.to(expected) - expected).norm()
    return (apart / (expected.norm() + _SMALL * whole)).item()


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The worst relative difference of two series of numbers."""
    return worst(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def merge(of_ranks: Iterable[Differences], expected: Iterable[str], ignored: Iterable[str] = ()) -> Differences:
    """One difference a parameter in the order of `expected`: the worst of any rank's; NaN where no rank holds it."""
    of_ranks = list(of_ranks)
    names = [*expected, *(name for rank in of_ranks for name in rank)]
    return {
        name: worst(rank[name] for rank in of_ranks if name in rank)
        for name in dict.fromkeys(names)
        if name not in set(ignored)
    }


def worst(values: Iterable[float]) -> float:
    """The largest, NaN above all, and NaN of nothing: `max` alone would pass NaN by."""
    values = list(values)
    return max(values) if values and not any(map(math.isnan, values)) else math.nan


def worst_name(differences: Differences) -> str | None:
    """Where the worst of them is."""
    return max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]), default=None)


def is_rounding(difference: float, bound: float) -> bool:
    """Whether it is within the bound; NaN is not."""
    return difference <= bound
