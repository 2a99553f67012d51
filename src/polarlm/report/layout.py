"""A run's layout as a person sees it before it runs: a table, and a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polarlm.config import ParallelConfig, Place, RunConfig, places, samples_at, stages_at, tokens_at
from polarlm.report.png import save_png

__all__ = ["describe_layout", "draw_layout"]

MOST_ROWS = 24
INK, PALE, COLOURS = "#3b3f46", "#ffffff", ("#cfe0f3", "#f6d9cc", "#d5ead2", "#e6dcf1", "#f5ebc4", "#d3ecec")
_SHARED = {1: "the optimizer's state", 2: "the optimizer's state and gradients", 3: "all state and parameters"}


def describe_layout(config: RunConfig) -> str:
    """Which rank of a resolved run holds what, a line a rank; many ranks are put together along the inner axes."""
    parallel, everyone = config.parallel, places(config.parallel)
    size = _group_size(parallel)
    groups = [everyone[start : start + size] for start in range(0, len(everyone), size)]
    columns = _columns(config)
    cells = [list(columns), *([cell(group) for cell in columns.values()] for group in groups)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    notes = [f"a shard is of {_SHARED[parallel.zero_stage]}"] if parallel.shards > 1 else []
    return "\n".join([_headline(config), *lines, *notes])


def _group_size(parallel: ParallelConfig) -> int:
    """Ranks of one line: the fewest that fill whole inner axes, or an even part of the data axis, in few lines."""
    inner = parallel.tensor * parallel.context
    parts = [inner * part for part in range(1, parallel.data + 1) if parallel.data % part == 0]
    assert parallel.ranks is not None
    return next((size for size in (1, parallel.tensor, *parts) if parallel.ranks <= MOST_ROWS * size), parts[-1])


def _headline(config: RunConfig) -> str:
    parallel, train = config.parallel, config.train
    shares = ("ring", "ulysses") if parallel.context_method == "hybrid" else ("context",)
    axes = [f"{axis} {getattr(parallel, axis)}" for axis in ("pipeline", "data", *shares, "tensor")]
    axes = [axis for axis in axes if not axis.endswith(" 1")] or ["1"]
    accumulation = train.gradient_accumulation_steps
    return (
        f"ranks {parallel.ranks} = {' x '.join(axes)}; samples a step {train.global_batch_size} of {train.seq_len} "
        f"tokens, microbatches a rank {accumulation} of {train.micro_batch_size}"
    )


def _columns(config: RunConfig) -> dict[str, Callable[[list[Place]], str]]:
    """What is told of each group of consecutive ranks: only what differs between some."""
    parallel = config.parallel

    def samples(group: list[Place]) -> str:
        parts = [samples_at(config, data) for data in sorted({place.data for place in group})]
        together = _span(range(parts[0].start, parts[-1].stop))
        return together if len(parts) == 1 else f"{together}, {len(parts[0])} each"

    def tokens(group: list[Place]) -> str:
        if len({place.context for place in group}) > 1:
            return f"1/{parallel.context} each"
        return ", ".join(map(_span, tokens_at(config, group[0].context)))

    def part(axis: str, parts: int) -> Callable[[list[Place]], str]:
        def tell(group: list[Place]) -> str:
            held = {getattr(place, axis) for place in group}
            return f"1/{parts} each" if len(held) > 1 else f"{held.pop() + 1} of {parts}"

        return tell

    columns: dict[str, tuple[bool, Callable[[list[Place]], str]]] = {
        "rank": (True, lambda group: _span(range(group[0].rank, group[-1].rank + 1))),
        "layers": (parallel.pipeline > 1, lambda group: layers_of(config, group[0])),
        "samples": (parallel.data > 1, samples),
        "tokens": (parallel.context > 1, tokens),
        "matrices": (parallel.tensor > 1, part("tensor", parallel.tensor)),
        "shard": (parallel.shards > 1, part("shard", parallel.shards)),
    }
    return {name: tell for name, (differs, tell) in columns.items() if differs}


def layers_of(config: RunConfig, place: Place) -> str:
    """The layers of a rank's stages, with embedding and head, such as `embedding, 0-3; 12-15, head`."""
    return "; ".join(
        ", ".join(["embedding"] * stage.is_first + [_span(stage.layers)] + ["head"] * stage.is_last)
        for stage in stages_at(config, place.pipeline)
    )


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def draw_layout(config: RunConfig, path: Path) -> None:
    """Draw a cell a rank: pipeline and data downwards, context and tensor across; a colour a pipeline stage.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    parallel = config.parallel
    rows, columns = parallel.pipeline * parallel.data, parallel.context * parallel.tensor
    figure = Figure(figsize=(4.4 + min(columns, 32) * 0.55, 1.5 + min(rows, 40) * 0.34), dpi=150, layout="constrained")
    panel = figure.subplots()
    for place in places(parallel):
        x = place.context * parallel.tensor + place.tensor
        y = place.pipeline * parallel.data + place.data
        colour = COLOURS[place.pipeline % len(COLOURS)]
        panel.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=PALE, linewidth=1.5))
        if rows <= 64 and columns <= 32:
            panel.text(x + 0.5, y + 0.5, str(place.rank), ha="center", va="center", fontsize=7, color=INK)
    panel.set(xlim=(0, columns), ylim=(rows, 0))
    _label(panel, config, rows, columns)
    figure.suptitle(_headline(config).replace("; ", "\n"), fontsize=8, color=INK)
    save_png(figure, path)


def _label(panel, config: RunConfig, rows: int, columns: int) -> None:
    """Say beside each row its layers and samples, above each column its tokens and part of the matrices."""
    parallel, everyone = config.parallel, places(config.parallel)
    first_column = [place for place in everyone if place.context == place.tensor == 0]
    first_row = [place for place in everyone if place.pipeline == place.data == 0]
    down, across = max(1, rows // 40), max(1, columns // 8)
    panel.set_yticks(
        [number + 0.5 for number in range(0, rows, down)],
        [_row_label(config, place) for place in first_column[::down]],
    )
    panel.set_xticks(
        [number + 0.5 for number in range(0, columns, across)],
        [_column_label(config, place) for place in first_row[::across]],
    )
    panel.xaxis.tick_top()
    panel.tick_params(length=0, labelsize=6, labelcolor=INK)
    for side in panel.spines.values():
        side.set_visible(False)
    for start in range(0, rows + 1, parallel.data):
        panel.axhline(start, color=INK, linewidth=0.8)
    for start in range(0, columns + 1, parallel.tensor):
        panel.axvline(start, color=INK, linewidth=0.8)


def _row_label(config: RunConfig, place: Place) -> str:
    samples = f"samples {_span(samples_at(config, place.data))}"
    return f"layers: {layers_of(config, place)}   {samples}" if config.parallel.pipeline > 1 else samples


def _column_label(config: RunConfig, place: Place) -> str:
    tokens = "tokens\n" + "\n".join(map(_span, tokens_at(config, place.context)))
    part = f"\nmatrices {place.tensor + 1}/{config.parallel.tensor}" if config.parallel.tensor > 1 else ""
    return tokens + part
