"""Several datasets as one, in proportion.

After any N samples each dataset has given within 1 of weight x N. To give the next sample to the dataset that lags
furthest behind does not do that for every choice of weights (with shares 1, 1 and 18 of 20 it does not), but the quota
method does (Balinski and Young, Amer. Math. Monthly 82, 1975; Tijdeman, Discrete Math. 32, 1980). With weights in whole
parts W of P the order repeats every P samples, and a table of one period finds any position at once.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from polarlm.config import DataConfig, UserError
from polarlm.data.documents import DocumentSamples
from polarlm.data.samples import Samples

_LONGEST_PERIOD = 100_000  # weights finer than five digits are rounded to them
# Of few digits each: a power of ten with nine of them would not end.
_WEIGHTED = re.compile(r"((?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][-+]?[0-9]{1,2})?)\s+(\S.*)")


@dataclass(frozen=True)
class WeightedPath:
    """A dataset of a blend; without a weight it counts by its tokens."""

    weight: Fraction | None
    prefix: str


def read_paths(data: DataConfig) -> list[WeightedPath]:
    """The datasets of a run, from `data.paths` or from the lines `weight prefix corpus` of `data.file_list`.

    Raises:
        UserError: the list cannot be read or has a bad line; a weight is not above 0; some have weights and some none.
    """
    paths = _read_list(Path(data.file_list)) if data.file_list else [_weighted(entry) for entry in data.paths]
    if any(path.weight is not None and path.weight <= 0 for path in paths):
        raise UserError("data.paths: a weight is above 0; leave a dataset out instead")
    if len({path.weight is None for path in paths}) > 1:
        raise UserError("data.paths: give every dataset a weight, as in `0.3 data/wiki`, or none")
    return paths


def _weighted(entry: str) -> WeightedPath:
    match = _WEIGHTED.fullmatch(entry.strip())
    return WeightedPath(Fraction(match[1]), match[2]) if match else WeightedPath(None, entry)


def _read_list(path: Path) -> list[WeightedPath]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.file_list: {path} cannot be read ({error})") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        words = line.split()
        if len(words) not in (2, 3) or not _WEIGHTED.fullmatch(f"{words[0]} x"):
            raise UserError(f"{path}:{number}: {line.strip()!r} is not `weight prefix corpus`")
        found.append(WeightedPath(Fraction(words[0]), words[1]))
    if not found:
        raise UserError(f"data.file_list: {path} names no dataset")
    return found


class BlendedSamples:
    """Samples of several datasets in one global order; with one interface with `Samples`."""

    def __init__(self, parts: Sequence[Samples | DocumentSamples], weights: Sequence[Fraction]) -> None:
        self.seq_len = parts[0].seq_len
        self._parts = parts
        self._quotas = whole_parts(weights)
        self._period = sum(self._quotas)

    def count(self, epochs: int = 1) -> int:
        """Samples until the first dataset would begin again, in proportion."""
        return min(
            part.count(epochs) * self._period // quota for part, quota in zip(self._parts, self._quotas, strict=True)
        )

    def id_at(self, position: int) -> int:
        """The sample at a position; its id says its dataset and its id there."""
        dataset, index = self.place(position)
        return self._parts[dataset].id_at(index) * len(self._parts) + dataset

    def place(self, position: int) -> tuple[int, int]:
        """(dataset, position among that dataset's samples)."""
        period, rest = divmod(position, self._period)
        datasets, indices = _one_period(self._quotas)
        dataset = int(datasets[rest])
        return dataset, period * self._quotas[dataset] + int(indices[rest])

    def spread(self, count: int) -> list[int]:
        """Ids of `count` samples in proportion, each dataset's spread evenly over it."""
        taken = [0] * len(self._parts)
        for position in range(count):
            taken[self.place(position)[0]] += 1
        return [
            sample * len(self._parts) + dataset
            for dataset, (part, number) in enumerate(zip(self._parts, taken, strict=True))
            for sample in part.spread(number)
        ]

    def begins_epoch(self, position: int) -> bool:
        """Whether a dataset gives its first sample of an epoch there, of those whose samples are documents."""
        dataset, index = self.place(position)
        return self._parts[dataset].begins_epoch(index)

    def length_of(self, sample: int) -> int:
        """See `DocumentSamples`."""
        return self._parts[sample % len(self._parts)].length_of(sample // len(self._parts))

    def source_of(self, sample: int) -> int:
        """Number of the dataset that a sample is of."""
        return sample % len(self._parts)

    def tokens_of(self, sample: int) -> np.ndarray:
        """See `Samples`."""
        return self._parts[sample % len(self._parts)].tokens_of(sample // len(self._parts))

    def document_ids(self, sample: int) -> np.ndarray:
        """See `Samples`."""
        return self._parts[sample % len(self._parts)].document_ids(sample // len(self._parts))


def whole_parts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as the smallest whole numbers in the same proportion, rounded where their sum would be too large."""
    denominator = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * denominator) for weight in weights]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    total = sum(whole)
    if total <= _LONGEST_PERIOD:
        return tuple(whole)
    rounded = [max(1, round(number * _LONGEST_PERIOD / total)) for number in whole]
    divisor = math.gcd(*rounded)
    return tuple(number // divisor for number in rounded)


@lru_cache(maxsize=8)
def _one_period(quotas: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each position of a period its dataset, and how many of that dataset's came before in the period.

    The j-th sample of a dataset with W of P samples may be given from position ⌊(j - 1)·P/W⌋ on, and must be before
    ⌈j·P/W⌉, or the dataset would be more than 1 ahead or behind. Of those that may, the one that must first is given;
    no deadline is ever missed. This is done from the period's end: the bounds are the same from there, and so samples
    come early between them rather than late. Ties go to the first.
    """
    period = sum(quotas)
    datasets, indices = np.empty(period, np.int32), np.empty(period, np.int32)
    left = list(quotas)
    begins: list[list[int]] = [[] for _ in range(period)]  # datasets whose next sample may be given from here on
    begins[0] = list(range(len(quotas)))
    may: list[tuple[int, int]] = []  # a heap of (deadline, -dataset)
    for step in range(period):
        for dataset in begins[step]:
            given = quotas[dataset] - left[dataset]
            heappush(may, (-(-(given + 1) * period // quotas[dataset]), -dataset))
        dataset = -heappop(may)[1]
        left[dataset] -= 1
        datasets[period - 1 - step], indices[period - 1 - step] = dataset, left[dataset]
        if left[dataset]:
            given = quotas[dataset] - left[dataset]
            begins[max(step + 1, given * period // quotas[dataset])].append(dataset)
    return datasets, indices
