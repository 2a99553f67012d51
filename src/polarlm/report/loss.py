"""The picture of a run: how its loss fell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.report.metrics import Step, column, read_metrics
from polarlm.report.png import save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_loss", "smooth"]

TRAINING, VALIDATION, INK, GRID = "#2f6db5", "#d1603d", "#3b3f46", "#e4e6ea"


def draw_loss(run_folder: Path) -> Path:
    """Draw `report/loss.png`: training and validation loss, and below them bits per byte where the run measured any.

    Raises:
        UserError: the run has no metrics.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = read_metrics(run_folder)
    bits = column(steps, "step", "val_bits_per_byte")
    ratios = [3, 1.3] if bits else [1]
    figure = Figure(figsize=(8, 6.2 if bits else 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_losses(panels[0], steps)
    if bits:
        _draw_bits(panels[1], bits)
    for panel in panels:
        _dress(panel)
    panels[-1].set_xlabel(_step_label(steps))
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.suptitle(run_folder.resolve().name, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)

    path = run_folder / "report" / "loss.png"
    save_png(figure, path)
    return path


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Mean over the finite values up to `reach` on either side, so that the curve does not lag behind a falling loss.

    At the start, where it falls fast, both sides shrink alike; at the end only the side that is missing does.
    """
    finite = [math.isfinite(value) for value in values]
    sums = [0.0, *accumulate(value if good else 0.0 for value, good in zip(values, finite, strict=True))]
    counts = [0, *accumulate(finite)]
    averages = []
    for at in range(len(values)):
        side = min(at, reach)
        first, end = at - side, min(at + side + 1, len(values))
        count = counts[end] - counts[first]
        averages.append((sums[end] - sums[first]) / count if count else math.nan)
    return averages


def _draw_losses(panel: Axes, steps: list[Step]) -> None:
    training, validation = column(steps, "step", "loss"), column(steps, "step", "val_loss")
    if training:
        at, losses = zip(*training, strict=True)
        averages = smooth(losses, len(losses) // 40)
        alone = "o" if len(at) == 1 else None
        panel.plot(at, losses, color=TRAINING, alpha=0.28, linewidth=0.8)
        panel.plot(at, averages, color=TRAINING, linewidth=1.8, marker=alone, label=f"training, {averages[-1]:.3f}")
    if validation:
        at, losses = zip(*validation, strict=True)
        panel.plot(
            at, losses, "o-", color=VALIDATION, linewidth=1, markersize=4.5, label=f"validation, {losses[-1]:.3f}"
        )
    panel.set_ylabel("loss (nats per token)")
    if training or validation:
        panel.legend(frameon=False, labelcolor=INK)


def _draw_bits(panel: Axes, bits: list[tuple[float, ...]]) -> None:
    at, values = zip(*bits, strict=True)
    panel.plot(at, values, "o-", color=VALIDATION, linewidth=1, markersize=4.5)
    panel.annotate(f"{values[-1]:.3f}", (at[-1], values[-1]), (0, 8), textcoords="offset points", ha="right", color=INK)
    panel.margins(y=0.2)
    panel.set_ylabel("validation\n(bits per byte)")


def _dress(panel: Axes) -> None:
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=INK, length=0)
    panel.xaxis.label.set_color(INK)
    panel.yaxis.label.set_color(INK)
    for side, spine in panel.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def _step_label(steps: list[Step]) -> str:
    counted = column(steps, "tokens", "step")
    if not counted or counted[-1][1] < 1:
        return "optimizer step"
    tokens, step = counted[-1]
    return f"optimizer step ({tokens / step:,.0f} tokens each)"
