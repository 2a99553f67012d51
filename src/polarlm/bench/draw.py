"""TFLOPS and memory over the sequence length, a line a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polarlm.bench.table import length_name
from polarlm.bench.trial import OOM, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_rows(rows: Sequence[Row]) -> Figure:
    """Two panels over the length on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.4), dpi=150, layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    for layout in dict.fromkeys(row.layout for row in rows):
        own = [row for row in rows if row.layout == layout]
        _draw(speed, own, "model_tflops_per_device", 1)
        _draw(memory, own, "peak_memory_bytes", 2**-30)
    speed.set_ylabel("model TFLOPS per device")
    memory.set_ylabel("peak memory of a rank, GiB")
    memory.set_xlabel("sequence length, tokens")
    lengths = sorted({row.seq_len for row in rows})
    memory.set_xscale("log", base=2)
    memory.set_xticks(lengths, [length_name(length) for length in lengths])
    memory.minorticks_off()
    for panel in (speed, memory):
        panel.grid(alpha=0.3)
        if any(row.is_ok for row in rows):
            panel.set_yscale("log")
    if speed.get_legend_handles_labels()[0]:
        speed.legend(frameon=False)
    return figure


def _draw(panel: Axes, rows: Sequence[Row], name: str, scale: float) -> None:
    good = [(row.seq_len, row.numbers[name] * scale) for row in rows if row.is_ok]
    (drawn,) = panel.plot(*zip(*good, strict=True), marker="o", label=rows[0].layout) if good else panel.plot([], [])
    # A cross at the foot of the panel where memory was not enough.
    over = [row.seq_len for row in rows if row.outcome == OOM]
    panel.plot(
        over,
        [0.03] * len(over),
        transform=panel.get_xaxis_transform(),
        marker="x",
        linestyle="",
        color=drawn.get_color(),
    )
