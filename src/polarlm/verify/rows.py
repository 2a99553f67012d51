"""The table that `polarlm verify` prints, a row a layout and model."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from polarlm.verify.compare import Differences, is_rounding, worst, worst_name


@dataclass(frozen=True)
class Row:
    """What came of one layout of one model.

    Attributes:
        bound: how much difference is rounding.
        loss, norm: largest relative difference of the loss and of the gradient norm over the steps.
        gradients, weights: relative differences by parameter, in the model's order.
        reason: why it was not tried, or what stopped it.
        tried: False where the ranks or the model's shape do not allow the layout.
    """

    layout: str
    model: str
    ranks: int = 0
    bound: float = 0.0
    seconds: float = 0.0
    loss: float = float("nan")
    norm: float = float("nan")
    gradients: Differences = field(default_factory=dict)
    weights: Differences = field(default_factory=dict)
    reason: str = ""
    tried: bool = True

    @property
    def passed(self) -> bool:
        """Tried, and every number within its bound; NaN never is."""
        return self.tried and not self.wrong

    @property
    def wrong(self) -> list[str]:
        """Which numbers are not within the bound."""
        return [name for name, number in self.numbers.items() if not is_rounding(number, self.bound)]

    @property
    def numbers(self) -> dict[str, float]:
        """The worst differences, by their columns' names."""
        return {
            "loss": self.loss,
            "gradient": worst(self.gradients.values()),
            "norm": self.norm,
            "weights": worst(self.weights.values()),
        }

    @property
    def first_wrong(self) -> str | None:
        """The first parameter of the model whose gradient, or else whose weight after the steps, is wrong."""
        wrong = (name for part in (self.gradients, self.weights) for name, difference in part.items()
                 if not is_rounding(difference, self.bound))  # fmt: skip
        return next(wrong, None)

    def as_json(self) -> dict[str, object]:
        """The row for a program; NaN is None there, since JSON has no word for it."""
        record = {
            "layout": self.layout,
            "model": self.model,
            "ranks": self.ranks,
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
            "bound": self.bound,
            "loss": self.loss,
            "gradient_norm": self.norm,
            "gradient": worst(self.gradients.values()),
            "gradient_of": worst_name(self.gradients),
            "weight": worst(self.weights.values()),
            "weight_of": worst_name(self.weights),
            "first_wrong": self.first_wrong,
        }
        return {key: None if value != value else value for key, value in record.items()}

    @property
    def verdict(self) -> str:
        """`ok`, `FAILED` or `not tried`."""
        return "ok" if self.passed else "FAILED" if self.tried else "not tried"


class Table:
    """Rows as lines of text, which may be printed as they come."""

    def __init__(self, layouts: Iterable[str], models: Iterable[str]) -> None:
        self._layout = max(map(len, (*layouts, "layout")))
        self._model = max(map(len, (*models, "model")))

    @property
    def head(self) -> str:
        """The columns' names."""
        numbers = "  ".join(f"{name:>8}" for name in ("loss", "gradient", "norm", "weights", "seconds"))
        return f"{'layout':<{self._layout}}  {'model':<{self._model}}  ranks  {numbers}"

    def line(self, row: Row) -> str:
        """One row; for one that failed the first wrong parameter, for one not tried the reason."""
        start = f"{row.layout:<{self._layout}}  {row.model:<{self._model}}  {row.ranks:>5}"
        if not row.tried:
            return f"{start}  not tried: {row.reason}"
        cells = "  ".join(f"{number:>8.1e}" for number in row.numbers.values())
        return f"{start}  {cells}  {row.seconds:>7.1f}s  {row.verdict}{self._remark(row)}"

    @staticmethod
    def _remark(row: Row) -> str:
        if row.reason:
            return f": {row.reason}"
        if row.passed:
            return f"; largest at {worst_name(row.gradients)}"
        first = f"; first wrong is {row.first_wrong}" if row.first_wrong else ""
        return f": {', '.join(row.wrong)}{first}"
