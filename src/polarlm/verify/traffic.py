"""What a training step sends on a layout, beside the textbook's amounts."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from polarlm.config import ParallelConfig, RunConfig, UserError
from polarlm.plan import step_traffic

_PADDING = 0.01  # what shards of a size that does not divide may send more


@dataclass(frozen=True)
class Amount:
    """One kind of collective along one axis in a step of all ranks: counted, and by the formula."""

    axis: str
    kind: str
    calls: int
    bytes: float
    textbook_calls: int
    textbook_bytes: float

    @property
    def agrees(self) -> bool:
        """As many calls, and as many bytes but for padding."""
        return self.calls == self.textbook_calls and (
            abs(self.bytes - self.textbook_bytes) <= _PADDING * self.textbook_bytes
        )


@dataclass(frozen=True)
class TrafficRow:
    """What one layout of one model sends; `reason` says why it was not tried, or what stopped it."""

    layout: str
    model: str
    ranks: int = 0
    amounts: list[Amount] = field(default_factory=list)
    reason: str = ""
    tried: bool = True

    @property
    def verdict(self) -> str:
        """`ok`, `FAILED` or `not tried`."""
        if not self.tried:
            return "not tried"
        return "ok" if not self.reason and all(amount.agrees for amount in self.amounts) else "FAILED"

    def as_json(self) -> dict[str, object]:
        """The row for a program."""
        return asdict(self) | {"verdict": self.verdict}


class TrafficTable:
    """Rows as text, a line a kind of collective."""

    def __init__(self, layouts: Iterable[str], models: Iterable[str]) -> None:
        self._layout = max(map(len, (*layouts, "layout")))
        self._model = max(map(len, (*models, "model")))

    @property
    def head(self) -> str:
        """The columns' names."""
        start = f"{'layout':<{self._layout}}  {'model':<{self._model}}  ranks"
        return (
            f"{start}  {'axis':<17}  {'collective':<14}  {'calls':>6}  {'textbook':>8}  {'bytes':>11}  {'textbook':>11}"
        )

    def line(self, row: TrafficRow) -> str:
        """One row, of as many lines as it has kinds of collectives."""
        start = f"{row.layout:<{self._layout}}  {row.model:<{self._model}}  {row.ranks:>5}"
        if row.reason or not row.amounts:
            return f"{start}  {row.verdict}: {row.reason or 'one rank sends nothing'}"
        return "\n".join(f"{start}  {self._amount(amount)}" for amount in row.amounts)

    @staticmethod
    def _amount(amount: Amount) -> str:
        calls = f"{amount.calls:>6}  {amount.textbook_calls:>8}"
        sizes = f"{amount.bytes:>11,.0f}  {amount.textbook_bytes:>11,.0f}"
        return f"{amount.axis:<17}  {amount.kind:<14}  {calls}  {sizes}  {'ok' if amount.agrees else 'FAILED'}"


def check_counted(config: RunConfig) -> None:
    """
    Raises:
        UserError: the formulas do not hold for this run.
    """
    for path, value, only in (
        ("train.precision", config.train.precision, config.train.parameter_precision),
        ("train.recompute", config.train.recompute, "none"),
        ("parallel.offload", config.parallel.offload, "none"),
    ):
        if value != only:
            raise UserError(f"{path}: the textbook's amounts are those of {only}, not {value}")


def compare_amounts(
    config: RunConfig, calls: dict[tuple[str, str], int], sizes: dict[tuple[str, str], float]
) -> list[Amount]:
    """What all ranks together counted in one step by (axis, kind), and the textbook's amounts, side by side."""
    textbook = step_traffic(config)
    return [
        Amount(
            axis=_say(axis, config.parallel),
            kind=kind,
            calls=calls.get((axis, kind), 0),
            bytes=sizes.get((axis, kind), 0.0),
            textbook_calls=textbook.calls.get((axis, kind), 0),
            textbook_bytes=textbook.bytes.get((axis, kind), 0.0),
        )
        for axis, kind in sorted(calls.keys() | textbook.calls.keys())
    ]


def _say(axis: str, parallel: ParallelConfig) -> str:
    """The axis, or the axes that are as long as the world."""
    assert parallel.ranks is not None
    lengths = {
        "replicate": parallel.data * parallel.context // parallel.shards,
        "shard": parallel.shards,
        "ring": parallel.ring,
        "ulysses": parallel.ulysses,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
    }
    covering = [name for name, length in lengths.items() if length == parallel.ranks]
    return "/".join(covering) if axis == "world" and covering else axis
